"""Runs in a process of its own: one SGLang release loads drafters with its own class, and one forward pass is made.

`python child.py JOB`, where JOB is a file that the front (`kitlib.probe`) wrote. Answers go to the job's `out`, one
JSON line each: first what was imported, then one line a drafter. Nothing of kitlib is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import sys
import types
from pathlib import Path

CLASS, MODULE = "LlamaForCausalLMEagle3", "models.llama_eagle3"  # the one drafter class that is asked
SHARDS = {"qkv_proj": {"q": "q_proj", "k": "k_proj", "v": "v_proj"}, "gate_up_proj": {0: "gate_proj", 1: "up_proj"}}
TOKENS = 4


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def call(function, **known):
    """Call with those arguments of `known` that this release's signature has."""
    names = inspect.signature(function).parameters
    return function(**{k: v for k, v in known.items() if k in names})


def find(module: str, name: str):
    """A name of one of this release's modules, or None where the release has no such thing."""
    try:
        return getattr(importlib.import_module(f"sglang.srt.{module}"), name, None)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("sglang."):  # something this environment lacks
            raise


def start(job: dict) -> dict:
    """Import the release, publish its settings, make process groups of one. Returns what was really imported."""
    import absent  # from this folder, which leaves the path before anything else is imported

    sys.path[0:1] = [job["root"]] if job["root"] else []
    absent.install()
    import torch
    import transformers

    # Plain torch everywhere: no AMX kernels, and no GPU to wait for.
    torch._C._cpu._is_amx_tile_supported = torch.cpu._is_amx_tile_supported = lambda: False
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    import sglang
    import sglang.srt.layers.quantization  # first, as in a server: linear and quantization import each other
    from sglang.srt import distributed
    from sglang.srt.server_args import ServerArgs

    publish, older = find("runtime_context", "publish"), find("server_args", "set_global_server_args_for_scheduler")
    if ranks := find("runtime_context", "SpawnRanks"):
        ranks = ranks(world_rank=0)
    if publish or older:
        arguments = ServerArgs(model_path=job["target"], device="cpu")
        call(publish, server_args=arguments, role="scheduler", ranks=ranks) if publish else older(arguments)
    else:  # the defaults are class attributes; the checks of __post_init__ look for a GPU
        arguments = object.__new__(ServerArgs)
        arguments.device = "cpu"
    store = f"file://{job['out']}.store"
    groups = {"world_size": 1, "rank": 0, "local_rank": 0, "backend": "gloo", "distributed_init_method": store}
    distributed.init_distributed_environment(**groups)
    call(distributed.initialize_model_parallel, tensor_model_parallel_size=1, backend="gloo")
    if setup := find("layers.dp_attention", "initialize_dp_attention"):
        config = transformers.AutoConfig.from_pretrained(job["target"])
        widths = {"tp_rank": 0, "tp_size": 1, "dp_size": 1, "pp_size": 1, "moe_dense_tp_size": None}
        model = types.SimpleNamespace(hf_config=config, hidden_size=1, dtype=torch.float32)
        call(setup, server_args=arguments, model_config=model, enable_dp_attention=False, **widths)
    importlib.import_module(f"sglang.srt.{MODULE}")
    absent.seal()
    settings = "publish with ranks" if ranks else "publish" if publish else "global" if older else "defaults"
    versions = {"release": sglang.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return versions | {"file": sglang.__file__, "settings": settings, "stand_ins": sorted(absent.used)}


class Warned(logging.Handler):
    """Keeps the last warning, to tell a silent drop from one that is logged."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class Loading:
    """One drafter through the release's own load_weights, and what became of every tensor and parameter."""

    def __init__(self, model, device: str) -> None:
        import torch

        self.model, self.device, self.keys, self.current = model, device, [], {}
        self.parameters = dict(model.named_parameters())
        self.delivered: dict[str, list] = {name: [] for name in self.parameters}  # (shard, values) each
        self.warned = Warned(logging.WARNING)
        default = find("model_loader.weight_utils", "default_weight_loader")
        for name, parameter in self.parameters.items():
            if device != "meta":
                with torch.no_grad():
                    parameter.fill_(float("nan"))  # our mark for "never written"
            loader = self.recording(name, getattr(parameter, "weight_loader", default))
            try:
                parameter.weight_loader = loader
            except AttributeError:  # a property of some parameter classes
                parameter._weight_loader = loader

    def recording(self, parameter: str, loader):
        def record(target, tensor, *shard, **more):
            result = loader(target, tensor, *shard, **more)
            part, names = _stacked(parameter)
            self.delivered[parameter].append((shard[0] if shard else None, tensor.numel()))
            self.current["into"] = parameter.replace(part, names[shard[0]]) if shard and names else parameter
            return result

        return record

    def tensors(self, files: list[str]):
        """(name, tensor) as a server's file reader yields them; a tensor is judged when the next one is asked for."""
        import torch
        from safetensors import safe_open

        for file in files:
            with safe_open(file, "pt") as handle:
                for name in list(handle.keys()):
                    self.current, self.warned.text = {"name": name, "into": "", "message": ""}, ""
                    before = getattr(self.model, "hot_token_id", None)
                    if self.device == "meta" and "d2t" not in name:
                        tensor = torch.empty(handle.get_slice(name).get_shape(), device="meta")
                    else:
                        tensor = handle.get_tensor(name)
                    if self.device != "meta" and tensor.is_floating_point() and tensor.element_size() > 1:
                        tensor = torch.nan_to_num(tensor)
                    yield name, tensor
                    key = self.current
                    if getattr(self.model, "hot_token_id", None) is not before:
                        key["into"] = "hot_token_id"
                    if "status" not in key:
                        kept = key["into"] in (name, f"model.{name}", "hot_token_id")
                        unread = "ignored" if "t2d" in name and not self.warned.text else "dropped"
                        key["status"] = unread if not key["into"] else "loaded" if kept else "renamed"
                        key["message"] = self.warned.text
                    self.keys.append(key)

    def run(self, files: list[str]) -> None:
        """Feed everything. An error ends a server; here the next tensors follow, to learn their fate as well."""
        logging.getLogger().addHandler(self.warned)
        source, more = self.tensors(files), True
        while more:
            try:
                self.model.load_weights(source)
                more = False
            except Exception as error:
                more = "name" in self.current and "status" not in self.current
                self.current |= {"status": "error", "message": one_line(error)}
        logging.getLogger().removeHandler(self.warned)

    def written(self) -> dict[str, float]:
        """Fraction of each parameter that holds something from the file."""
        import torch

        if self.device == "meta":  # a vocabulary is padded, so a tensor for the whole counts as the whole
            shares = {
                n: sum(1 if s is None else c / p.numel() for s, c in self.delivered[n])
                for n, p in self.parameters.items()
            }
            return {name: min(1.0, share) for name, share in shares.items()}
        return {n: 1 - float(torch.isnan(p.float()).float().mean()) for n, p in self.parameters.items()}

    def missing(self, written: dict[str, float]) -> list[str]:
        """Parameters, or shards of a stacked one, that got nothing or not enough."""
        names = []
        for parameter in (n for n, share in written.items() if share < 1):
            part, shards = _stacked(parameter)
            got = {shard for shard, _ in self.delivered[parameter]}
            names += [parameter.replace(part, n) for s, n in shards.items() if s not in got] or [parameter]
        return names


def _stacked(parameter: str) -> tuple[str, dict]:
    """The stacked projection in a parameter's name, and its shards."""
    return next(((part, names) for part, names in SHARDS.items() if f".{part}." in parameter), ("", {}))


def attention():
    """An attention backend without a cache: causal over the tokens of one call."""
    from torch.nn.functional import scaled_dot_product_attention as attend

    def run(q, k, v, layer, *_, **__):
        q, k, v = (x.view(TOKENS, -1, layer.head_dim).transpose(0, 1)[None] for x in (q, k, v))
        out = attend(q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(TOKENS, -1)

    return types.SimpleNamespace(forward=run)


def forward(model, width: int, device: str) -> dict:
    """Feed states of this width through the release's own drafter and say whether fc was called."""
    import torch

    calls: list[bool] = []
    hook = model.model.fc.register_forward_hook(lambda *_: calls.append(True))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, width, generator=generator).to(device, torch.bfloat16)
    batch = types.SimpleNamespace(
        forward_mode=find("model_executor.forward_batch_info", "ForwardMode").DECODE,
        spec_info=types.SimpleNamespace(hidden_states=hidden),
        attn_backend=attention(),
        mm_input_embeds=None,
        contains_mm_inputs=lambda: False,
    )
    scope = contextlib.nullcontext()
    place = "model_executor.forward_context"  # later releases look there for the backend, not in the batch
    if enter := find(place, "forward_context"):
        scope = enter(find(place, "ForwardContext")(attn_backend=batch.attn_backend))
    finite, message = None, ""
    try:
        with torch.no_grad(), scope:
            ids = torch.arange(TOKENS, device=device)
            out = model.model(ids, ids, batch)[0]
        finite = None if device == "meta" else bool(torch.isfinite(out).all())
    except Exception as error:
        message = one_line(error)
    hook.remove()
    return {"width": width, "fc": bool(calls), "finite": finite, "error": message}


def other_class(name: str) -> dict:
    """A class that no file of the release defines is refused; one that it has is not asked here."""
    models = Path(sys.modules["sglang"].__file__).parent / "srt" / "models"
    if any(f"class {name}(" in file.read_text(encoding="utf-8") for file in models.glob("*.py")):
        return {"refused": "", "not_run": f"the probe asks {CLASS} only, not {name}"}
    return {"refused": f"no model of this release is named {name}"}


def examine(layout: dict, device: str) -> dict:
    """Everything about one drafter; `refused` says why this release would not start with it."""
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(layout["drafter"])
        if (name := (config.architectures or ["(none)"])[0]) != CLASS:
            return other_class(name)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            model = find(MODULE, CLASS)(config).eval()
    except Exception as error:
        ours = isinstance(error, (NotImplementedError, MemoryError)) or "allocate memory" in str(error)
        return {"refused": "", "not_run": one_line(error)} if ours else {"refused": one_line(error)}
    finally:
        torch.set_default_dtype(torch.float32)
    loading = Loading(model, device)
    loading.run(layout["files"])
    written = loading.written()
    errors = [f"{k['name']}: {k['message']}" for k in loading.keys if k["status"] == "error"]
    answer = {"keys": loading.keys, "written": written, "missing": loading.missing(written)}
    answer["refused"] = next(iter(errors), "")
    try:  # what the EAGLE3 worker does next
        model.get_hot_token_id()
        shared = torch.nn.Parameter(torch.full(layout["embedding"], 0.01, device=device, dtype=torch.bfloat16), False)
        model.set_embed(shared)
    except Exception as error:
        return answer | {"refused": answer["refused"] or one_line(error)}
    for key in loading.keys:
        if key["into"] == "model.embed_tokens.weight" and model.model.embed_tokens.weight is shared:
            key["status"] = "overwritten"
    with torch.no_grad():
        for parameter in model.parameters() if device != "meta" else ():
            parameter[torch.isnan(parameter)] = 0.02
    return answer | {"forward": [forward(model, width, device) for width in layout["widths"]]}


def main(path: str) -> None:
    """Answer a job line by line, so that what was answered survives a later crash."""
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    with open(path, encoding="utf-8") as handle:
        job = json.load(handle)
    with open(job["out"], "w", encoding="utf-8", buffering=1) as out:
        out.write(json.dumps(start(job)) + "\n")
        for layout in job["layouts"]:
            out.write(json.dumps(examine(layout, job["device"])) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
