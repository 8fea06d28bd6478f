"""Towers, their pretrained weights, and the files of the Hugging Face Hub.

The settings of a model enter; `Towers` leave: two modules that map uint8 pixels and token ids to features.
"""
