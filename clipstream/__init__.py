"""clipstream trains contrastive image-text models (CLIP, SigLIP) over WebDataset shards."""

__version__ = "0.1.0"
