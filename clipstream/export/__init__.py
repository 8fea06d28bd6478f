"""Export, a wing that the core never imports: models for other programs, features as tables, interpolation of weights.

Checkpoints and stores of features enter; folders for transformers, ONNX, open_clip and sentence-transformers with their
proof, Parquet and NumPy files, and models between two models leave.
"""
