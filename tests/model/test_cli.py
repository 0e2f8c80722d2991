"""The commands, run in this process through `main` and, where the process itself matters, in one of their own."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kimi_k3
from kimi_k3 import (
    KimiK3Config,
    KimiK3ForCausalLM,
    KimiK3ForConditionalGeneration,
    KimiK3Tokenizer,
    environment,
)
from kimi_k3 import generation as generation_module
from kimi_k3.cli import main
from kimi_k3.image_processing_kimi_k3 import KimiK3ImageProcessor

GOLDEN = Path(__file__).parent.parent / "golden"
DEMO = Path(kimi_k3.__file__).parent / "demo"


def run_process(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kimi_k3.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def reference() -> dict:
    return json.loads((GOLDEN / "golden.reference" / "reference.json").read_text())


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory) -> Path:
    """A small model with random weights and a vocabulary that has the chat markers: the demo model's."""
    folder = tmp_path_factory.mktemp("chat")
    config = KimiK3Config.tiny()
    values = config.to_dict()
    values.pop("vision_config")
    values["text_config"] |= {"vocab_size": 1280, "bos_token_id": 1024, "eos_token_id": 1026, "pad_token_id": 1279}
    values |= {"bos_token_id": 1024, "eos_token_id": 1026, "pad_token_id": 1279}
    torch.manual_seed(0)
    KimiK3ForCausalLM(KimiK3Config.from_dict(values)).save_pretrained(folder)
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_constants.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


# generate


def test_generate_prints_the_text_of_the_golden_greedy_tokens(capsys, monkeypatch, reference):
    """Three other implementations chose these tokens. Their prompt is no text, so it stands in for the encoded one."""
    monkeypatch.setattr(KimiK3Tokenizer, "encode", lambda self, text: reference["tokens"])
    assert main(["generate", str(GOLDEN / "golden"), "--prompt", "x", "--dtype", "float32"]) == 0
    tokens = reference["hf_f32_greedy"]
    end = tokens.index(257)  # [EOS]
    expected = KimiK3Tokenizer.from_pretrained(GOLDEN / "golden").decode(tokens[:end])
    out, err = capsys.readouterr()
    assert out == expected + "\n"
    assert "64 prompt tokens" in err and f"{end + 1} new tokens" in err and "end: stop" in err


def test_generate_without_stream_prints_the_same(capsys):
    command = ["generate", str(GOLDEN / "golden"), "--prompt", "KING:", "--max-new-tokens", "6", "--dtype", "float32"]
    assert main(command) == 0
    streamed = capsys.readouterr().out
    assert main([*command, "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed and len(streamed) > 1


def test_generate_reads_the_prompt_from_a_file_or_from_stdin(capsys, tmp_path, monkeypatch):
    command = ["generate", str(GOLDEN / "golden"), "--max-new-tokens", "6", "--dtype", "float32"]
    outputs = []
    for arguments in (["--prompt", "abc"], ["--prompt-file", str(tmp_path / "prompt")], []):
        (tmp_path / "prompt").write_text("abc")
        monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
        assert main([*command, *arguments]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]


def test_generate_hands_every_option_on(capsys, monkeypatch):
    seen = {}

    def record(model, input_ids, **options):
        experts = model.model.layers["1"].block_sparse_moe.experts
        seen.update(options, ids=list(input_ids), dtype=model.dtype, packed=experts.packed)
        yield generation_module.GeneratedToken(65, "A", "length")

    monkeypatch.setattr(generation_module, "stream_generate", record)
    command = (
        "generate {} --prompt ab --max-new-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 11 --min-p 0.1 --seed 3 "
        "--stop x --stop yz --dtype bfloat16 --device cpu --experts dequantized"
    )
    assert main(command.format(GOLDEN / "golden").split()) == 0
    assert seen.pop("tokenizer") is not None
    assert seen == {
        "ids": [97, 98], "max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 11, "min_p": 0.1, "seed": 3,
        "stop": ("x", "yz"), "dtype": torch.bfloat16, "packed": False,
    }  # fmt: skip


def test_generate_with_a_seed_repeats_itself(capsys):
    outputs = []
    for seed in (1, 1, 2):
        command = f"generate {GOLDEN / 'golden'} --prompt ab --temperature 1 --max-new-tokens 12 --seed {seed}"
        assert main(command.split()) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_generate_shows_images_to_the_model(capsys):
    folder, images = GOLDEN / "vision", GOLDEN / "vision.reference" / "images"
    files = [str(images / "rgb_150x110.png"), str(images / "palette_50x30.png")]
    command = ["generate", str(folder), "--prompt", "What?", "--max-new-tokens", "5", "--dtype", "float32"]
    assert main([*command, "--image", files[0], "--image", files[1]]) == 0
    out = capsys.readouterr().out

    tokenizer = KimiK3Tokenizer.from_pretrained(folder)
    model = KimiK3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    content = [{"type": "image", "image": file} for file in files] + [{"type": "text", "text": "What?"}]
    ids = torch.tensor([tokenizer.encode_chat([{"role": "user", "content": content}]).ids])
    inputs = KimiK3ImageProcessor.from_pretrained(folder)(files)
    tokens = model.generate(
        ids, max_new_tokens=5, eos_token_id=list(tokenizer.end_token_ids), pixel_values=inputs.pixel_values,
        grid_thws=inputs.grid_thws,
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    assert out == tokenizer.decode(token for token in tokens if token not in tokenizer.end_token_ids) + "\n"


def test_generate_without_a_path_opens_the_demo_model(monkeypatch):
    opened = []

    def refuse(path, **options):
        opened.append(Path(path))
        raise ValueError("seen")

    monkeypatch.setattr(KimiK3Tokenizer, "from_pretrained", refuse)
    assert main(["generate", "--prompt", "x"]) == 2
    assert opened == [DEMO]


def test_ctrl_c_ends_generate_cleanly():
    """A real process and a real signal; the endless stream stands in for a long generation."""
    program = (
        "import sys, time\n"
        "from kimi_k3 import generation\n"
        "from kimi_k3.cli import main\n"
        "def endless(*args, **options):\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "        yield generation.GeneratedToken(65, 'A', None)\n"
        "generation.stream_generate = endless\n"
        f"sys.exit(main(['generate', {str(GOLDEN / 'golden')!r}, '--prompt', 'x']))\n"
    )
    command = [sys.executable, "-c", program]
    # A test run in the background of a shell inherits an ignored SIGINT; a user's terminal does not.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.read(3) == "AAA"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert set(out) <= {"A", "\n"} and out.endswith("\n")
    assert "Traceback" not in err and "end: interrupted" in err


# chat


class ScriptedReplies:
    """Stands in for the model: each call yields the next reply; an exception in one is raised there."""

    def __init__(self, folder: Path, *replies: list) -> None:
        self.tokenizer = KimiK3Tokenizer.from_pretrained(folder)
        self.replies = list(replies)
        self.prompts: list[list[int]] = []

    def __call__(self, model, input_ids, **options):
        self.prompts.append(list(input_ids))
        for piece in self.replies.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            for token_id in self.tokenizer.encode(piece, allow_special=True):
                yield SimpleNamespace(token_id=token_id, text="", finish_reason=None)

    def ids(self, *pieces: str) -> list[int]:
        return [token_id for piece in pieces for token_id in self.tokenizer.encode(piece, allow_special=True)]


THOUGHT = ("I ponder.", "<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>")
END = ("<|close|>", "response", "<|sep|>", "<|close|>", "message", "<|sep|>", "<|end_of_msg|>")


def chat(monkeypatch, folder: Path, replies: ScriptedReplies, *lines: str) -> int:
    monkeypatch.setattr(generation_module, "stream_generate", replies)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", str(folder)])


def test_chat_keeps_the_history_as_it_was_generated(capsys, monkeypatch, chat_folder):
    first = (*THOUGHT, "Aye.", *END)
    replies = ScriptedReplies(chat_folder, first, (*THOUGHT, "No.", *END))
    assert chat(monkeypatch, chat_folder, replies, "Who's there?", "And you?", "/exit", "never read") == 0
    out = capsys.readouterr().out
    assert out.count("I ponder.\n\nAye.") == 1 and out.count("I ponder.\n\nNo.") == 1 and "<|" not in out
    turn = replies.prompts[0] + replies.ids(*first)
    assert replies.prompts[1][: len(turn)] == turn
    asked = replies.tokenizer.decode(replies.prompts[1][len(turn) :])
    assert "And you?" in asked and "Who's there?" not in asked


def test_chat_reset_forgets(capsys, monkeypatch, chat_folder):
    replies = ScriptedReplies(chat_folder, (*THOUGHT, "Aye.", *END), (*THOUGHT, "No.", *END))
    assert chat(monkeypatch, chat_folder, replies, "Who's there?", "/reset", "Who's there?") == 0  # stdin's end leaves
    assert replies.prompts[0] == replies.prompts[1]


def test_chat_dims_reasoning_on_a_terminal(capsys, monkeypatch, chat_folder):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert chat(monkeypatch, chat_folder, ScriptedReplies(chat_folder, (*THOUGHT, "Aye.", *END)), "Who's there?") == 0
    assert "\x1b[2mI ponder.\x1b[0m\n\nAye." in capsys.readouterr().out


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(capsys, monkeypatch, chat_folder):
    cut = ("I pon", KeyboardInterrupt())
    replies = ScriptedReplies(chat_folder, cut, (*THOUGHT, "No.", *END))
    assert chat(monkeypatch, chat_folder, replies, "Who's there?", "And you?") == 0
    assert "No." in capsys.readouterr().out
    turn = replies.prompts[0] + replies.ids("I pon", "<|end_of_msg|>")  # the cut-off turn is closed
    assert replies.prompts[1][: len(turn)] == turn


def test_ctrl_c_at_the_prompt_leaves(capsys, monkeypatch, chat_folder):
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert main(["chat", str(chat_folder)]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_chat_shows_tool_calls(capsys, monkeypatch, chat_folder):
    call = (
        *THOUGHT, "<|close|>", "response", "<|sep|>", "<|open|>", "tools", "<|sep|>",
        "<|open|>", 'call tool="play" index="1"', "<|sep|>", "<|open|>", 'argument key="act" type="number"', "<|sep|>",
        "3", "<|close|>", "argument", "<|sep|>", "<|close|>", "call", "<|sep|>", "<|close|>", "tools", "<|sep|>",
        *END[3:],
    )  # fmt: skip
    assert chat(monkeypatch, chat_folder, ScriptedReplies(chat_folder, call), "Go on.") == 0
    assert '[tool call play {"act": 3}]' in capsys.readouterr().out


def test_chat_with_the_real_model_answers(capsys, monkeypatch, chat_folder):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who's there?\nAnd you?\n"))
    assert main(["chat", str(chat_folder), "--max-new-tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out.count("> ") == 3


def test_chat_needs_the_markers(capsys):
    assert main(["chat", str(GOLDEN / "golden")]) == 2
    assert "<|open|>" in capsys.readouterr().err


# plan


def test_plan_takes_a_folder_with_config_alone(capsys, tmp_path):
    KimiK3Config.tiny().save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["stored_bytes"] is None and values["checkpoint_bytes"] == values["device"]["weight_bytes"]


def test_plan_of_the_release(capsys):
    if "KIMI_K3_TEST_DATA" not in os.environ:
        pytest.skip("KIMI_K3_TEST_DATA is not set")
    folder = Path(os.environ["KIMI_K3_TEST_DATA"]).parent / "spec"
    command = f"plan {folder} --mesh tp=8,ep=64 --device-memory 141GB --context 131072 --batch 64"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    for figure in (
        "2,779,931,837,184", "104,189,614,848", "1,560,860,324,864", "27,648", "434,110,464", "15,261,696",
        "fits                yes",
    ):  # fmt: skip
        assert figure in out
    assert main([*command.split(), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["mesh"] == {"tp": 8, "ep": 64, "ranks": 64, "groups": 8}
    assert values["device"]["memory_bytes"] == 141 * 10**9 and values["device"]["sequences"] == 8


def test_plan_of_a_checkpoint_counts_its_own_bytes(capsys):
    assert main(["plan", str(GOLDEN / "golden"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["stored_bytes"] == values["checkpoint_bytes"]


def test_plan_tells_when_a_checkpoint_is_not_its_config(capsys, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "golden" / name, tmp_path / name)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_experts"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path)]) == 0
    assert "kimi-k3 verify" in capsys.readouterr().err


def test_plan_with_known_hardware(capsys):
    command = ["plan", str(GOLDEN / "golden"), "--hardware", "h200", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["device"]["fits"] is True
    assert main([*command, "--device-memory", "1GB"]) == 2


# verify and convert


def test_verify_of_a_whole_checkpoint(capsys):
    assert main(["verify", str(GOLDEN / "golden")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "whole"
    assert main(["verify", str(GOLDEN / "golden"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["is_whole"] and values["num_tensors"] == 1002 and values["problems"] == []


def test_verify_of_a_damaged_checkpoint_names_the_file(capsys, tmp_path):
    shutil.copy(GOLDEN / "golden" / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "golden" / "model.safetensors").read_bytes()[:-1])
    assert main(["verify", str(tmp_path)]) == 1
    assert "problem: " in (out := capsys.readouterr().out) and str(tmp_path / "model.safetensors") in out
    assert main(["verify", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"]


def test_verify_without_a_checkpoint_is_an_error(capsys, tmp_path):
    assert main(["verify", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_convert_and_plan_agree_on_the_bytes(capsys, tmp_path):
    command = f"convert {GOLDEN / 'golden'} {tmp_path / 'plain'} --experts dequantized --max-shard-size 1MB"
    assert main(command.split()) == 0
    assert len(list((tmp_path / "plain").glob("model-*.safetensors"))) > 1
    assert main(["verify", str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "plain"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["stored_bytes"] == values["checkpoint_bytes"]
    assert values["components"]["routed_experts"]["bytes_by_dtype"].keys() == {"BF16"}


# env


def test_env_is_one_json_object():
    process = run_process("env", "--json")
    assert process.returncode == 0
    values = json.loads(process.stdout)
    assert values["packages"]["torch"] == torch.__version__
    assert "kda_chunk" in values["ops"] and set(values["ops"]["kda_chunk"]) == {"cpu", "cuda"}
    assert "KIMI_K3_LOG_LEVEL" in values["variables"]


def test_env_prints_a_line_for_each_op_and_variable(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*environment.op_names(), *environment.PACKAGES):
        assert any(line.split()[:1] == [name] for line in lines)
    for name in environment.VARIABLES:
        assert any(line.startswith(f"{name}=") for line in lines)


def test_env_tells_a_kernel_from_the_reference():
    """In a process of its own: a registration cannot be taken back."""
    program = (
        "import torch\n"
        "from kimi_k3.environment import op_kernels\n"
        "library = torch.library.Library('kimi_k3', 'FRAGMENT')\n"
        "library.define('probe(Tensor x) -> Tensor')\n"
        "assert op_kernels('probe') == {'cpu': None, 'cuda': None}, op_kernels('probe')\n"
        "library.impl('probe', lambda x: x.clone(), 'CompositeExplicitAutograd')\n"
        "assert op_kernels('probe') == {'cpu': 'reference', 'cuda': 'reference'}, op_kernels('probe')\n"
        "library.impl('probe', lambda x: x.clone(), 'CPU')\n"
        "assert op_kernels('probe')['cpu'].startswith('kernel ('), op_kernels('probe')\n"
        "assert op_kernels('probe')['cuda'] == 'reference', op_kernels('probe')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# errors


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "COMMAND"),
        (["plan"], "path"),
        (["plan", "no/such/folder"], "no/such/folder"),
        (["plan", str(GOLDEN / "golden"), "--mesh", "tp=3,ep=3"], "num_attention_heads"),
        (["plan", str(GOLDEN / "golden"), "--mesh", "tp=2,ep=3"], "mesh"),
        (["plan", str(GOLDEN / "golden"), "--device-memory", "much"], "--device-memory"),
        (["plan", str(GOLDEN / "golden"), "--batch", "2"], "batch"),
        (["generate", str(GOLDEN / "golden"), "--prompt", ""], "prompt"),
        (["generate", str(GOLDEN / "golden"), "--prompt", "x", "--top-p", "2"], "top_p"),
        (["generate", str(GOLDEN / "golden"), "--prompt", "x", "--device", "warp"], "--device"),
        (["generate", str(GOLDEN / "golden"), "--prompt", "x", "--prompt-file", "y"], "--prompt"),
        (["generate", str(GOLDEN / "golden"), "--prompt-file", "no-such-file"], "no-such-file"),
        (["generate", str(GOLDEN / "golden"), "--prompt", "x", "--image", "no-such-file"], "vision_config"),
        (["generate", str(GOLDEN / "vision"), "--prompt", "x", "--image", "no-such-file"], "no-such-file"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, arguments, words):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("kimi-k3: error: ") and words in last and "Traceback" not in err


def test_an_error_of_the_process_has_no_traceback():
    process = run_process("generate", "no/such/folder", "--prompt", "x")
    assert (process.returncode, process.stdout, len(process.stderr.splitlines())) == (2, "", 1)


def test_log_level_is_read_from_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("KIMI_K3_LOG_LEVEL", "chatty")
    assert main(["env"]) == 2
    assert "KIMI_K3_LOG_LEVEL" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "kimi_k3.cli", "env"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)
