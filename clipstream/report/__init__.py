"""What a run shows of itself: metrics files, TensorBoard, the terminal."""
