"""Every stage of a conversation by Hugging Face transformers with eager attention, in f64 unless said otherwise: its own f32
rounding is several times ours, up to 3e-5 in the shipped model, whose attention is sharp."""
import json

import numpy as np
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL import Image
from tokenizers import Tokenizer
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import get_vision_window_index
from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

torch.set_num_threads(2)


def template_of(folder):
    """The chat template: in a file of its own, or among the tokenizer's settings."""
    own = folder / "chat_template.jinja"
    return own.read_text() if own.exists() else json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


class Reference:
    def __init__(self, folder, dtype=torch.float64):
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template_of(folder))

    def typed(self, patches):
        return None if patches is None else patches.to(self.model.dtype)

    def pixels(self, messages):
        """Patches of all pictures in merge order, and their grids."""
        files = [p["image"] for m in messages if isinstance(m["content"], list) for p in m["content"] if p["type"] == "image"]
        if not files:
            return None, None
        out = self.processor([Image.open(f).convert("RGB") for f in files], return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"]

    def ids(self, messages, grids):
        """Prompt ids, with one placeholder per row of the picture."""
        text = self.template.render(messages=messages, add_generation_prompt=True)
        for t, h, w in grids.tolist() if grids is not None else []:
            text = text.replace("<|image_pad|>", "<|mark|>" * (t * h * w // 4), 1)
        return self.tokenizer.encode(text.replace("<|mark|>", "<|image_pad|>"), add_special_tokens=False).ids

    def window_order(self, grids):
        """For each row of the vision tower's order, the patch in merge order."""
        v = self.model.config.vision_config
        index, _ = get_vision_window_index(grids, v.spatial_merge_size, v.window_size, v.patch_size)
        return (torch.as_tensor(index)[:, None] * 4 + torch.arange(4)).reshape(-1)

    def stages(self, ids, n_prompt, patches, grids):
        """Teacher-forced over ids: what our --dump writes, in its order. Patches in merge order."""
        found, handles, m = {}, [], self.model.model

        def keep(name, module, fn=lambda x: x):
            def hook(_, __, out):
                found[name] = fn(out[0] if isinstance(out, tuple) else out).detach().float().reshape(-1, out[0].shape[-1]).numpy()

            handles.append(module.register_forward_hook(hook))

        if grids is not None:
            order = self.window_order(grids)
            groups = torch.argsort(order.reshape(-1, 4)[:, 0] // 4)
            keep("patch_embed", m.visual.patch_embed, lambda x: x[order])
            for i, block in enumerate(m.visual.blocks):
                keep(f"vision.{i:02d}", block)
            keep("merger", m.visual.merger, lambda x: x[groups])
        for i, layer in enumerate(m.language_model.layers):
            keep(f"text.{i:02d}", layer)
        positions = []
        handles.append(m.language_model.register_forward_pre_hook(lambda _, a, kw: positions.append(kw["position_ids"]), with_kwargs=True))
        x = torch.tensor([ids])
        pad = self.model.config.image_token_id
        with torch.no_grad():
            out = self.model(input_ids=x, attention_mask=torch.ones_like(x), pixel_values=self.typed(patches), image_grid_thw=grids, mm_token_type_ids=(x == pad).int(), use_cache=False)
        for h in handles:
            h.remove()
        plain = torch.arange(len(ids)).expand(3, 1, -1)  # without pictures the model counts for itself
        found["positions"] = (plain if positions[0] is None else positions[0][-3:])[:, 0].T.numpy()
        found["logits"] = out.logits[0, n_prompt - 1 :].float().numpy()
        return found

    def greedy(self, ids, patches, grids, n):
        x = torch.tensor([ids])
        kw = {} if grids is None else dict(pixel_values=self.typed(patches), image_grid_thw=grids)
        pad = self.model.config.image_token_id
        out = self.model.generate(input_ids=x, attention_mask=torch.ones_like(x), mm_token_type_ids=(x == pad).int(), max_new_tokens=n, do_sample=False, **kw)
        return out[0, len(ids) :].tolist()
