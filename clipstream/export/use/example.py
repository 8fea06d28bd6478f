"""Features of the images in a folder, and of texts."""

from pathlib import Path

from encoder import Encoder  # type: ignore[import-not-found]

encoder = Encoder()
images = encoder.images(sorted(Path("images").iterdir()))
texts = encoder.texts(["a photo of a cat", "a photo of a dog"])
print(images @ texts.T)
