"""`megarl serve` as a shell starts it: a real server behind the endpoint, asked by the stock client, and ended by Ctrl-C."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from megarl.cluster.stacks import foreign_stack
from megarl.command_line import main
from megarl.core.errors import UserError
from megarl.core.janitor import kill_all, segments_of
from megarl.core.scratch import REGISTRY
from megarl.run.serve import servable
from megarl.serving.process import process_tree
from tests.agents.drawing import data_url
from tests.support.processes import ended, heed_interrupts
from tests.support.sight import picture
from tests.support.tiny import write_tiny_qwen
from tools.make_tiny_vision_model import make_tiny_vision_model


@dataclass
class Served:
    process: subprocess.Popen[str]
    client: openai.OpenAI
    temp: Path


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A model that sees."""
    make_tiny_vision_model(tmp_path / "run" / "hf", kind="qwen3_vl", hidden_size=64, context=2048)
    temp = Path(tempfile.mkdtemp(prefix="t"))
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl", "serve", str(tmp_path / "run"), "--port", "0", "--dtype", "float32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temp)},
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        assert process.stdout is not None
        said = ""
        while "curl" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        found = dict(re.findall(r"export (OPENAI_\w+)=(\S+)", said))
        assert found["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
        client = openai.OpenAI(base_url=found["OPENAI_BASE_URL"], api_key=found["OPENAI_API_KEY"], max_retries=0)
        yield Served(process, client, temp)
    finally:
        if process.poll() is None:
            kill_all(process_tree(process.pid))
            process.wait(10)
        shutil.rmtree(temp, ignore_errors=True)


def answers_are_of_the_images_that_were_sent(client: openai.OpenAI, model: Path) -> None:
    """As transformers' model would answer of this image, and of another."""
    images, found = [picture(64, 96), picture(64, 96, 1)], []
    for image in images:
        part = {"type": "image_url", "image_url": {"url": data_url(image)}}
        asked: Any = [{"role": "user", "content": [part, {"type": "text", "text": "1+1"}]}]
        answer = client.chat.completions.create(model="run", messages=asked, max_tokens=1, n=16, logprobs=True)
        whole = [choice.logprobs.content for choice in answer.choices if choice.logprobs is not None]
        found.append([(token.token, token.logprob) for [token] in filter(None, whole)])
    first, second = (next_logprobs(model, image, "1+1") for image in images)
    for told, ours, other in ((found[0], first, second), (found[1], second, first)):
        said = [(token, logprob) for token, logprob in told if token in ours]
        assert len(told) == 16 and said
        assert max(abs(ours[token] - logprob) for token, logprob in said) < 1e-4
        assert max(abs(other[token] - logprob) for token, logprob in said) > 1e-3


def next_logprobs(model: Path, image: bytes, text: str) -> dict[str, float]:
    """Of each token behind an image and a text, as transformers' model has them; of tokens that are no whole character, none."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    patches = Qwen2VLImageProcessorPil.from_pretrained(model)(
        images=[Image.open(io.BytesIO(image))], return_tensors="pt"
    )
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    pad, squares = net.config.image_token_id, int(patches["image_grid_thw"].prod()) // 4
    place = ids.index(pad)
    tokens = torch.tensor([[*ids[:place], *[pad] * squares, *ids[place + 1 :]]])
    with torch.no_grad():
        scores = net(input_ids=tokens, **patches, mm_token_type_ids=(tokens == pad).int()).logits[0, -1]
    logprobs = scores.log_softmax(-1).tolist()
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    return {text: logprobs[token] for token, text in enumerate(texts) if texts.count(text) == 1}


@pytest.mark.slow
@pytest.mark.needs("SGLang")
def test_a_run_is_served_until_ctrl_c_and_nothing_stays(served: Served, tmp_path: Path) -> None:
    client = served.client
    answers_are_of_the_images_that_were_sent(client, tmp_path / "run" / "hf")
    assert [model.id for model in client.models.list()] == ["run"]
    messages: list[Any] = [{"role": "user", "content": "1+1=" * 20}]
    usages = []
    for _ in range(6):
        answer = client.chat.completions.create(model="run", messages=messages, max_tokens=12, seed=1)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        usages.append((answer.usage.prompt_tokens_details.cached_tokens or 0, answer.usage.prompt_tokens))
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": "2+2="},
        ]
    stream = client.completions.create(model="run", prompt="1+1=", max_tokens=5, n=2, logprobs=0, stream=True)
    assert {chunk.choices[0].index for chunk in stream} == {0, 1}
    with pytest.raises(openai.BadRequestError, match="and the model's context is"):
        client.completions.create(model="run", prompt=[5] * 100_000)
    for (_, before), (cached, _) in pairwise(usages):
        assert cached >= 0.95 * before, usages  # of what both requests have in common

    tree = process_tree(served.process.pid)
    # The janitor finds what a killed one leaves by its name: no process has it mapped any more.
    [registry] = served.temp.glob(f"megarl-*/{REGISTRY}")
    assert segments_of(tree) <= set(registry.read_text().split()) != set()
    served.process.send_signal(signal.SIGINT)
    try:
        assert served.process.wait(60) == 128 + signal.SIGINT
    except subprocess.TimeoutExpired as error:
        stacks = "\n".join(f"== {pid}\n{foreign_stack(pid)}" for pid in process_tree(served.process.pid))
        raise AssertionError(f"it goes on after Ctrl-C:\n{stacks}") from error
    assert ended(tree)
    assert not [path.name for path in served.temp.iterdir() if path.name.startswith("megarl-")]


@pytest.mark.slow
@pytest.mark.needs("SGLang")
@pytest.mark.parametrize("killed", ["scheduler", "driver"])
def test_one_that_is_killed_as_it_starts_leaves_no_shared_memory(tmp_path: Path, killed: str) -> None:
    """Of SGLang's processes or megarl's own, before the server is ready: nobody has asked yet what it has mapped."""
    model, temp = write_tiny_qwen(tmp_path / "hf"), Path(tempfile.mkdtemp(prefix="t"))
    try:
        # On a machine that others use, the moment can pass between two looks.
        made = next(
            (names for _ in range(4) if (names := killed_in_time(model, temp, tmp_path / "said", killed))), set()
        )
        assert made, "it was ready each time before anybody saw what it had made"
        deadline = time.monotonic() + 20  # the janitor's, of one that is killed itself
        while made & set(os.listdir("/dev/shm")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not made & set(os.listdir("/dev/shm"))
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def killed_in_time(model: Path, temp: Path, log: Path, killed: str) -> set[str]:
    """Start one, and kill it as soon as it is seen to have made shared memory, which is returned; nothing where it was ready."""
    command = [sys.executable, "-m", "megarl", "serve", str(model), "--port", "0", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temp)}
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
    try:
        made: set[str] = set()
        while not made:
            assert process.poll() is None, log.read_text()
            if "curl" in log.read_text():
                return set()
            time.sleep(0.02)
            tree = process_tree(process.pid)
            for pid in tree:
                if made := {name for name in segments_of([pid]) if name.startswith("sglang_loads_")}:
                    os.kill(pid if killed == "scheduler" else process.pid, signal.SIGKILL)
                    break
        assert process.wait(60) in (1, -signal.SIGKILL)
        assert ended(tree)
        return made
    finally:
        if process.poll() is None:
            kill_all(process_tree(process.pid))
            process.wait(10)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        servable(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no model"):
        servable(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tool-parser", "qwen99"], "there is no such parser"),
        (["--dtype", "float64"], "wanted is one of float32, bfloat16"),
        (["--tp", "3"], "megarl: --tp 3 does not divide the model"),
        (["--tp", "2"], "megarl: --tp 2: this machine shows 1 devices"),
        (["--host", "192.0.2.77"], "nothing can listen there: Cannot assign requested address. Give a --host that is"),
        (["--host", "no.such.host.invalid"], "Give a --host that is this machine's"),
        ([], "weights (*.safetensors)"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    tmp_path: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_qwen(tmp_path / "hf")
    if not words:
        (model / "model.safetensors").unlink()
    monkeypatch.setattr("megarl.run.serve.num_local_devices", lambda _: 1)
    monkeypatch.setattr(sys, "argv", ["megarl", "serve", str(model), *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and says in capsys.readouterr().err
