"""What a Python program uses besides the functions of the verbs: runs, models and loaders.

Names, folders, images and texts enter; tensors and the contents of a run's folder leave. `clipstream` exports what is
public here.
"""
