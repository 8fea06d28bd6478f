"""JPEGs of a batch, decoded together by nvImageCodec, and their crops, resized together.

Files enter; pixels leave, on the device: by the hardware decoder of a GPU, or by nvImageCodec's libjpeg-turbo on a CPU,
with chroma interpolated, as Pillow does. Whole images are decoded, because nvImageCodec 0.9.0 fails on regions on GPUs
(NVIDIA/nvImageCodec#55). The memory of the images is nvImageCodec's, kept from batch to batch, and never torch's, whose
allocator could give it away while the hardware writes into it. What the decoder refuses, Pillow decodes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from clipstream.data.decode.images import Pixels, load_image, open_image
from clipstream.errors import Dropped, SettingsError

LEAST = (0, 8)  # version
CPU_ONLY = -99999  # nvImageCodec's number of the device that is no GPU
CHUNK_BYTES = 1 << 28  # of the crops that are resized together, as float32
LEAST_DB = 50.0  # of a test image, below which a warning says that the decoder gives other pixels than Pillow
THREADS = 4  # of nvImageCodec; on a GPU they only read headers
_PACKAGE = (
    "nvidia-nvimgcodec-cu13[nvjpeg], or -cu12[nvjpeg] for torch of CUDA 12: pip install 'clipstream[gpu-decoder]'"
)
_VIDEO = "a container needs the driver capability 'video' (NVIDIA_DRIVER_CAPABILITIES=compute,utility,video)"


class JpegDecoder:
    """nvImageCodec's decoder of JPEGs on a device.

    Args:
        device: torch's name of the device.

    Attributes:
        name: of the decoder, for people.
        decibels: PSNR of a test image to Pillow's pixels.

    Raises SettingsError: nvImageCodec is not installed, or cannot decode on this device.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        gpu = self.device.type == "cuda"
        with _captured_stderr() as told:  # it prints there which libraries it does not find
            try:
                codec = import_module("nvidia.nvimgcodec")
            except ImportError as error:
                raise SettingsError(f"data.decoder gpu requires {_PACKAGE} ({error})") from error
            if tuple(map(int, codec.__version__.split(".")[:2])) < LEAST:
                raise SettingsError(f"data.decoder gpu requires {_PACKAGE} (installed: {codec.__version__})")
            kind = codec.BackendKind.HW_GPU_ONLY if gpu else codec.BackendKind.CPU_ONLY
            number = self.device.index or 0 if gpu else CPU_ONLY
            failure = "it decodes no JPEG"
            test: torch.Tensor | None = None
            self._images: list[Any] = []  # whose memory is used again
            data, expected = _test_image()
            try:
                options = {"max_num_cpu_threads": THREADS, "options": ":fancy_upsampling=1"}
                self._decoder = codec.Decoder(device_id=number, backends=[codec.Backend(kind)], **options)
                self._stream, self._params = codec.CodeStream, codec.DecodeParams(apply_exif_orientation=False)
                _, test = self([np.frombuffer(data, dtype=np.uint8)] * 2)  # several take another way than one
            except RuntimeError as error:
                failure = str(error)
            told.seek(0)
            said = re.sub(rb"\x1b\[[0-9;]*m", b"", told.read()).decode(errors="replace")
        self.name = (
            f"nvImageCodec {codec.__version__}, {'the hardware decoder' if gpu else 'libjpeg-turbo'} on {device}"
        )
        if test is None:
            why = f"the GPU needs a hardware decoder of JPEG and CUDA 12, and {_VIDEO}" if gpu else "it needs 0.9 there"
            detail = " ".join(said.split())[:600]
            raise SettingsError(
                f"data.decoder gpu: {self.name}: {failure}: {why}; or use --data.decoder fast. {detail}"
            )
        squares = (test.cpu().numpy().astype(float) - expected) ** 2
        self.decibels = float(10 * np.log10(255**2 / max(squares.mean(), 1e-6)))

    def __call__(self, files: Sequence[Pixels]) -> list[torch.Tensor | None]:
        """uint8 [h, w, 3] of each file uint8 [bytes], valid until the next call; None where the decoder refuses it.

        On CUDA, on the current stream, which is waited for before and after: the hardware does not keep to its order.
        """
        gpu = self.device.type == "cuda"
        number, places, streams = 0, [], []
        if gpu:
            current = torch.cuda.current_stream(self.device)
            current.synchronize()
            number = current.cuda_stream
        for place, file in enumerate(files):
            with contextlib.suppress(RuntimeError):
                streams.append(self._stream(file))
                places.append(place)
        if not streams:
            return [None] * len(files)
        kept = [*self._images, *[None] * len(streams)]
        found = self._decoder.decode(streams, images=kept[: len(streams)], params=self._params, cuda_stream=number)
        if gpu:
            current.synchronize()
        self._images = [new or old for new, old in zip(found, kept, strict=False)] + self._images[len(streams) :]
        decoded: list[torch.Tensor | None] = [None] * len(files)
        for place, image in zip(places, found, strict=True):
            if image is not None:
                # nvImageCodec's DLPack calls CUDA also for memory of the CPU.
                decoded[place] = from_dlpack(image) if gpu else torch.from_numpy(np.asarray(image))
        return decoded

    def close(self) -> None:
        """Release the images' memory."""
        self._images.clear()


def decode_by_pillow(file: Pixels) -> torch.Tensor:
    """uint8 [h, w, 3] of a JPEG with three components, on the CPU. Raises Dropped."""
    image = load_image(open_image(file.tobytes()))
    if image.mode != "RGB":
        raise Dropped("undecodable_image", f"decoded as {image.mode}")
    return torch.from_numpy(np.array(image))


def crop_and_resize(images: Sequence[torch.Tensor], crops: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """uint8 [n, 3, H, W] of the crops of images, as Pillow resizes them, without its rounding between the axes.

    Each axis is a product with a matrix of weights, for all images at once: the number of kernels does not depend on n,
    but for one in CHUNK_BYTES of crops.

    Args:
        images: uint8 [h, w, 3], on one device.
        crops: int32 [n, 7] on the CPU, as Batch.jpegs.
        size: (H, W).
    """
    device, most = images[0].device, crops[:, 3:5].amax(dim=0)
    width, height = most.tolist()
    step = max(1, CHUNK_BYTES // (12 * width * height))
    made = torch.empty(len(images), 3, *size, dtype=torch.uint8, device=device)
    for start in range(0, len(images), step):
        some = images[start : start + step]
        flat = torch.cat([image.reshape(-1, 3) for image in some])
        pitches = torch.tensor([image.shape[1] for image in some])
        before = torch.tensor([0, *(image.shape[0] * image.shape[1] for image in some[:-1])]).cumsum(dim=0)
        part = crops[start : start + step].long()
        first = before + part[:, 2] * pitches + part[:, 1]
        table = torch.stack([first, pitches, *part[:, 3:].unbind(dim=1)]).to(device)
        first, pitches, widths, heights, flips, linear = table[:, :, None].unbind()
        # Pixels outside of a crop are those of its edge, and have weight 0.
        rows = torch.arange(height, device=device).minimum(heights - 1) * pitches + first
        columns = torch.arange(width, device=device).minimum(widths - 1)
        planes = flat[rows[:, :, None] + columns[:, None]].permute(0, 3, 1, 2).float()
        down = resize_weights(heights, size[0], height, linear)
        across = resize_weights(widths, size[1], width, linear)
        across = torch.where(flips[..., None] > 0, across.flip(1), across)
        narrow = (planes @ across[:, None].mT).clamp_(0, 255)  # as Pillow does, which here also rounds
        pixels = down[:, None] @ narrow
        made[start : start + step] = pixels.round_().clamp_(0, 255)
    return made


def resize_weights(lengths: torch.Tensor, size: int, most: int, linear: torch.Tensor) -> torch.Tensor:
    """float32 [n, size, most]: weights of an axis' first `lengths` pixels in each of `size` resized ones.

    Source: Pillow's Resample.c (precompute_coeffs): a cubic (a = -0.5) or triangle filter, stretched where it reduces.

    Args:
        lengths: int64 [n, 1], of the crops.
        most: the longest of them.
        linear: int64 [n, 1], whether the filter is the triangle.
    """
    scale = lengths[..., None].double() / size
    centres = (torch.arange(size, device=lengths.device)[:, None] + 0.5) * scale
    pixels = torch.arange(most, device=lengths.device)
    x = ((pixels + 0.5 - centres) / scale.clamp(min=1)).abs().float()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    cubic = torch.where(x < 1, near, far) * (x < 2)
    weights = torch.where(linear[..., None] > 0, (1 - x).clamp(min=0), cubic) * (pixels < lengths[..., None])
    return weights / weights.sum(dim=2, keepdim=True)


def _test_image() -> tuple[bytes, Pixels]:
    """A JPEG with edges of colour, 4:2:0, and Pillow's pixels of it."""
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((128, 128), Image.Resampling.BICUBIC).save(file, "JPEG", quality=95, subsampling=2)
    return file.getvalue(), np.asarray(Image.open(file))


@contextlib.contextmanager
def _captured_stderr() -> Iterator[BinaryIO]:
    """A context in which a file takes what the process, and libraries in it, write to standard error."""
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)
