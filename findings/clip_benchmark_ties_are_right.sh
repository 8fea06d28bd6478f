#!/usr/bin/env bash
# clip-benchmark's metric of SugarCrepe and Winoground gives a text tower that ignores the order of words 100% on swapped words.
#
# Versions: clip-benchmark 1.6.1, torch 2.15.0. image_caption_selection takes the argmax of an image's scores, which is the first
# of equal ones, and the right caption comes first. A tower that averages word embeddings gives a caption and the same words in
# another order equal features, so each choice is a tie, which counts as right: 1.0, where a guess has 0.5. Winoground's text
# score of the same tower is 0 (its second caption is right for the second image), where a guess has 0.25. image_acc of a data set
# with one image a sample is always 1, as one image is the nearest of one, and acc is text_acc. In half precision (amp) different
# captions tie, too.
#
# Seen 2026-11-29: one image and two captions {'image_acc': 1.0, 'text_acc': 1.0, 'acc': 1.0};
#   with right and swapped captions exchanged: text_acc 1.0 again; two images and two captions: 0.0 in all three
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.15.0 numpy==2.4.1 tqdm==4.67.1
"$work/venv/bin/pip" install --quiet --no-deps clip-benchmark==1.6.1
"$work/venv/bin/python" - 2> /dev/null <<'EOF'
import torch
from clip_benchmark.metrics.image_caption_selection import evaluate

torch.manual_seed(0)
words = {word: number for number, word in enumerate("a the cup dog on bowl under cat table".split())}


class Bag(torch.nn.Module):
    """Texts are the sums of whole numbers, one vector a word, so that their order makes no difference to the last bit."""

    def __init__(self):
        super().__init__()
        self.table = torch.randint(-8, 9, (len(words), 16)).float()

    def encode_text(self, ids):
        return self.table[ids].sum(dim=1)

    def encode_image(self, images):
        return images.flatten(1)[:, :16]


def tokenize(texts):
    return torch.tensor([[words[word] for word in text.split()] for text in texts])


right = [f"a {one} on the {other}" for one in ("cup", "dog", "cat") for other in ("bowl", "table")]
swapped = [f"a {text.split()[4]} on the {text.split()[1]}" for text in right]
model = Bag()
one_image = [(torch.randn(1, 3, 4, 4), [[a, b]]) for a, b in zip(right, swapped)]
exchanged = [(images, [texts[0][::-1]]) for images, texts in one_image]
two_images = [(torch.randn(1, 2, 3, 4, 4), [[a, b]]) for a, b in zip(right, swapped)]
found = [evaluate(model, data, tokenize, "cpu", amp=False) for data in (one_image, two_images, exchanged)]
print(*found, sep="\n")
assert found[0] == {"image_acc": 1.0, "text_acc": 1.0, "acc": 1.0}
assert set(found[1].values()) == {0.0} and found[2]["text_acc"] == found[0]["text_acc"]
EOF
