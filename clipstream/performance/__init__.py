"""Figures of the work: FLOPs of a model and peaks of GPUs enter, TFLOP/s and MFU of a training line leave."""
