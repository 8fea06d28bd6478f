#!/usr/bin/env bash
# sentence-transformers pads SigLIP's texts to the longest of the batch, not to the trained length: features depend on the batch.
#
# Versions: sentence-transformers 6.2.0, transformers 5.24.0, torch 2.15.0. SigLIP and SigLIP2 are trained on texts of exactly 64
# tokens without an attention mask, and pool the last position, which is padding for nearly all texts. SentenceTransformer takes
# such a model, for texts and images, but calls its processor with padding=True (base/modules/transformer.py: preprocess), which
# also wins over the padding="max_length" that Siglip2Processor has by default. encode() sorts by length, so a text is padded to
# the length of its neighbours, and the position that is pooled, and its position embedding, differ from batch to batch and from
# all that training has seen. Nothing warns; images are right. transformers' pipeline for zero-shot classification pads to 64.
# Give encode(…, processing_kwargs={"text": {"padding": "max_length", "max_length": 64}}).
#
# Seen 2026-11-29 (a small SigLIP trained on 16 pairs at 16 tokens, captions of 7 to 12; lowest cosine of a caption's feature
#   with the one at the trained length, in batches of 16, 4 and 1; of its features in batches of 16 and 1)
#   as it is: 0.9932, 0.8646, 0.8646, 0.8581; max_length: 1.0000, 1.0000, 1.0000, 1.0000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchvision==0.29.2 pillow transformers==5.24.0 \
    sentence-transformers==6.2.0
cat > "$work/padding.py" <<'EOT'
import sys

import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, SiglipConfig, SiglipImageProcessor, SiglipModel, SiglipProcessor

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
PLACES = {"left": (0, 8), "upper right": (16, 0), "very bottom of it": (8, 24), "lower right of the whole picture": (24, 16)}
texts, images = [], []
for name, colour in COLOURS.items():
    for place, (x, y) in PLACES.items():
        texts.append(f"a {name} square at the {place}")
        images.append(Image.new("RGB", (32, 32)))
        images[-1].paste(colour, (x, y, x + 8, y + 8))
words = ["</s>", *sorted({word for text in texts for word in text.split()})]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="</s>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
special = {"pad_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, model_max_length=16, model_input_names=["input_ids"], **special
)
processor = SiglipProcessor(SiglipImageProcessor(size={"height": 32, "width": 32}), tokenizer)
size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "vocab_size": len(words)}
text, vision = {**size, **ids, "max_position_embeddings": 16}, {**size, "image_size": 32, "patch_size": 8}
torch.manual_seed(0)
model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision)).train()
inputs = processor(text=texts, images=images, padding="max_length", return_tensors="pt")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(500):
    outputs = model(**inputs)
    loss = torch.nn.functional.cross_entropy(10 * outputs.text_embeds @ outputs.image_embeds.T, torch.arange(16))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval().save_pretrained(sys.argv[1])
processor.save_pretrained(sys.argv[1])
with torch.no_grad():
    outputs = model(**inputs)


def lowest(features, others):
    return (torch.as_tensor(features) * torch.as_tensor(others)).sum(dim=1).min().item()


encoder = SentenceTransformer(sys.argv[1], device="cpu")
kinds = {"as it is": {}, "max_length": {"processing_kwargs": {"text": {"padding": "max_length", "max_length": 16}}}}
found = {}
for kind, options in kinds.items():
    rows = [encoder.encode(texts, batch_size=batch, normalize_embeddings=True, **options) for batch in (16, 4, 1)]
    found[kind] = [*(lowest(row, outputs.text_embeds) for row in rows), lowest(rows[0], rows[2])]
    print(f"{kind}: {', '.join(f'{cosine:.4f}' for cosine in found[kind])}")
pictures = lowest(encoder.encode(images, normalize_embeddings=True), outputs.image_embeds)
assert (outputs.image_embeds @ outputs.text_embeds.T).argmax(dim=1).equal(torch.arange(16))
assert all(cosine > 0.9999 for cosine in (*found["max_length"], pictures)), (found, pictures)
assert found["as it is"][0] < 0.999 and all(cosine < 0.95 for cosine in found["as it is"][1:]), found
EOT
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore "$work/padding.py" "$work/model"
