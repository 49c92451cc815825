"""The command as a user meets it: exit codes, one-line errors with their mend, data on stdout."""

import contextlib
import io
import json
import logging
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from astrolabe.cli.main import main
from astrolabe.records.errors import UsageError
from astrolabe.records.run_store import RunStore
from graphs.options import ROLES, SynthOptions, load_options, parse_shard

ASTROLABE = [sys.executable, "-m", "astrolabe.cli.main"]


def installed(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess:
    """The command as a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [*ASTROLABE, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=environment
    )


def astrolabe(*arguments: object) -> subprocess.CompletedProcess:
    """The same in this process, which need not import everything anew."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
    finally:
        root.handlers = handlers
        root.setLevel(level)
    return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())


def assert_user_error(done: subprocess.CompletedProcess, code: int, *words: str) -> None:
    """One line that names the fault and the mend, nothing on stdout, no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.split("\n") if line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("astrolabe: ")
    assert ". To mend it: " in lines[0] or "see `astrolabe" in lines[0]
    for word in words:
        assert word in lines[0], lines[0]
    assert done.stdout == ""


@pytest.fixture
def card(tmp_path):
    """A file with one small server card."""
    tools = [
        {
            "name": name,
            "description": f"Gives the {name} of a city by its name.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        }
        for name in ("population", "mayor", "altitude")
    ]
    row = {"name": "cities", "description": "Facts about cities.", "domain": "Geography", "license": "MIT"}
    file = tmp_path / "cards.jsonl"
    file.write_text(json.dumps({**row, "source": None, "tools": tools, "connect": None}) + "\n")
    return file


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["nonsense", "astrolabe --help"]),
        (["synth", "trajectories", "--out", "x"], ["--servers", "synth trajectories --help"]),
        (["synth", "trajectories", "--servers", "x", "--out", "y", "--limit", "many"], ["--limit"]),
        (["serve", "teacher", "--port", "99999"], ["--port"]),
    ],
)
def test_a_wrong_flag_is_usage(arguments, words):
    assert_user_error(astrolabe(*arguments), 2, *words)


def test_the_installed_command_prints_one_line_and_exits_with_the_code(tmp_path):
    done = installed("synth", "trajectories", "--servers", tmp_path / "missing.jsonl", "--out", tmp_path / "out")
    assert_user_error(done, 2, "missing.jsonl")
    assert_user_error(installed("status", tmp_path), 1, "run.json")
    assert_user_error(installed("nonsense"), 2, "astrolabe --help")


@pytest.mark.parametrize(
    "arguments",
    [
        ["synth", "trajectories", "--servers", "{missing}", "--out", "{out}"],
        ["synth", "environments", "--knowledge", "{missing}", "--out", "{out}"],
        ["synth", "trajectories", "--servers", "{missing}", "--out", "{out}", "--config", "{missing}"],
        ["env", "check", "{missing}"],
        ["rollout", "--envs", "{missing}", "--model-url", "http://127.0.0.1:1", "--out", "{out}"],
        ["reward", "{missing}", "--kind", "ladder"],
        ["train", "sft", "--config", "{missing}"],
        ["eval", "envs", "--envs", "{missing}", "--model-url", "http://127.0.0.1:1"],
        ["serve", "policy", "--model", "{missing}", "--port", "0"],
    ],
)
def test_a_missing_file_is_named_and_nothing_is_begun(tmp_path, arguments):
    places = {"missing": tmp_path / "missing.jsonl", "out": tmp_path / "out"}
    done = astrolabe(*(argument.format(**places) for argument in arguments))
    assert_user_error(done, 2, "missing.jsonl")
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_malformed_card_is_named_and_rejected_and_the_others_are_worked_on(tmp_path, card):
    card.write_text('{"a": \n' + card.read_text())
    done = astrolabe("synth", "trajectories", "--servers", card, "--out", tmp_path / "out")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "cards.jsonl, line 1: not JSON" in done.stderr
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [row["reasons"] for row in rejected if row["item"] == "line 1"] == [["not_json"]]
    assert astrolabe("status", tmp_path / "out").returncode == 0


def test_an_input_without_a_line_is_usage_and_begins_no_run(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    for verb, flag in (("trajectories", "--servers"), ("environments", "--knowledge")):
        done = astrolabe("synth", verb, flag, tmp_path / "empty.jsonl", "--out", tmp_path / "out")
        assert_user_error(done, 2, "empty.jsonl", "holds no")
        assert not (tmp_path / "out").exists()


def test_labels_that_find_no_room_end_the_run_in_one_line(tmp_path, card):
    rest = ("--out", tmp_path / "out", "--labels", "/dev/full", "--defect-rate", 1)
    done = astrolabe("synth", "trajectories", "--servers", card, *rest)
    assert_user_error(done, 1, "/dev/full", "No space left")


def test_malformed_json_is_named_by_file_and_line(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"a": \n')
    assert_user_error(astrolabe("reward", file, "--kind", "ladder"), 2, "bad.jsonl", "line 1")
    done = astrolabe("synth", "environments", "--knowledge", file, "--out", tmp_path / "out")
    assert done.returncode == 3
    assert "bad.jsonl, line 1: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_line_of_environments_that_is_no_json_fails_its_row_and_no_traceback_is_shown(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"a": \n')
    done = astrolabe("env", "check", file, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["reasons"] == ["schema_invalid"]
    assert "Traceback" not in done.stderr


def test_an_unknown_config_key_is_named_with_the_known_ones(tmp_path, card):
    config = tmp_path / "run.toml"
    config.write_text("sead = 3\n")
    done = astrolabe("synth", "trajectories", "--servers", card, "--out", tmp_path / "out", "--config", config)
    assert_user_error(done, 2, "run.toml", "`sead`", "seed")
    config.write_text("[roles.judge]\nmodell = 'x'\n")
    done = astrolabe("synth", "trajectories", "--servers", card, "--out", tmp_path / "out", "--config", config)
    assert_user_error(done, 2, "roles.judge", "`modell`")
    config.write_text("seed = = 3\n")
    done = astrolabe("synth", "trajectories", "--servers", card, "--out", tmp_path / "out", "--config", config)
    assert_user_error(done, 2, "not TOML")


@pytest.mark.parametrize("flags", [["--config", "{config}"], ["--model.path", "x", "--sead", "3"]])
def test_an_unknown_key_of_training_is_named_with_the_closest(tmp_path, flags):
    config = tmp_path / "train.toml"
    config.write_text("sead = 3\n")
    done = astrolabe("train", "grpo", *(flag.format(config=config) for flag in flags))
    assert_user_error(done, 2, "sead", "seed")


def test_a_dead_server_fails_before_a_folder_is_made(tmp_path, card):
    url = f"http://127.0.0.1:{free_port()}"
    done = astrolabe("synth", "trajectories", "--servers", card, "--out", tmp_path / "out", "--model-url", url)
    assert_user_error(done, 1, url, "--model-url")
    assert not (tmp_path / "out").exists()


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert_user_error(astrolabe("serve", "teacher", "--port", port), 2, str(port), "another port")


def test_status_and_view_of_no_run_and_replay_of_no_run(tmp_path, card):
    assert_user_error(astrolabe("status", tmp_path), 1, "run.json")
    assert astrolabe("view", tmp_path).returncode in (1, 2)
    done = astrolabe(
        "synth", "trajectories", "--servers", card, "--out", tmp_path / "out", "--replay", tmp_path / "none"
    )
    assert_user_error(done, 1, "none", "run.json")
    assert not (tmp_path / "out").exists()


def test_another_run_in_the_folder_is_refused_and_left_alone(tmp_path, card):
    RunStore.open(tmp_path / "out", verb="other", config={}, seed=0).close()
    before = (tmp_path / "out" / "run.json").read_bytes()
    done = astrolabe("synth", "trajectories", "--servers", card, "--out", tmp_path / "out")
    assert_user_error(done, 1, "verb", "another --out")
    assert (tmp_path / "out" / "run.json").read_bytes() == before


def test_status_reads_a_run_that_is_stopped_and_one_that_is_finished(tmp_path):
    store = RunStore.open(tmp_path / "run", verb="synth trajectories", config={}, seed=0)
    usage = {"calls": 4, "prompt_tokens": 30, "completion_tokens": 10}
    store.commit(
        "a",
        rows={"trajectories": [{"id": "t1"}, {"id": "t2"}]},
        rejected=[{"item": "a", "stage": "judged", "reasons": ["low", "odd"], "detail": "", "row": {}}],
        funnel=[("planned", 3, 3, {}), ("judged", 3, 2, {"low": 1})],
        timings=[{"id": "a", "seconds": 1.5}],
        metrics=[{"item": "a", "usage": usage}],
    )
    with open(tmp_path / "run" / "trajectories.jsonl", "a") as file:
        file.write('{"id": "not committed"}\n')
    running = json.loads(astrolabe("status", tmp_path / "run", "--json").stdout)
    assert running["state"] == "running"
    store.close()
    done = astrolabe("status", tmp_path / "run", "--json")
    assert done.returncode == 3
    status = json.loads(done.stdout)
    assert status["state"] == "stopped"
    assert status["rows"] == {"trajectories": 2}
    assert status["rejected"] == {"low": 1, "odd": 1}
    assert status["stages"][1]["rate"] == pytest.approx(2 / 3)
    assert status["cost"]["per_accepted"] == {
        "calls": 2, "prompt_tokens": 15, "completion_tokens": 5, "seconds": 0.75
    }  # fmt: skip
    with RunStore.open(tmp_path / "run", verb="synth trajectories", config={}, seed=0) as store:
        store.finish()
    done = astrolabe("status", tmp_path / "run")
    assert done.returncode == 0
    assert "finished" in done.stdout
    assert "judged" in done.stdout


def test_doctor_reports_as_json_and_names_a_server_that_is_gone():
    done = astrolabe("doctor", "--json", "--model-url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert {"python", "jax", "sandbox", "embedding", "bubblewrap", "server"} <= found.keys()
    assert not found["server"]["ok"]
    assert found["server"]["mend"]
    assert found["python"]["ok"]
    assert report["ok"] is False


def test_every_verb_has_help():
    for verb in (
        ["demo"], ["doctor"], ["synth", "trajectories"], ["synth", "environments"], ["env", "check"], ["serve", "policy"],
        ["serve", "teacher"], ["train", "sft"], ["train", "grpo"], ["train", "dpo"], ["rollout"], ["reward"],
        ["eval", "envs"], ["status"], ["view"],
    ):  # fmt: skip
        from typer.testing import CliRunner

        from astrolabe.cli.main import app

        result = CliRunner().invoke(app, [*verb, "--help"])
        assert result.exit_code == 0, verb
        assert "Usage:" in result.output


def test_serve_teacher_answers_and_ends_on_ctrl_c():
    import httpx

    port = free_port()
    process = subprocess.Popen([*ASTROLABE, "serve", "teacher", "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert str(port) in process.stderr.readline()
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=20, trust_env=False)
        assert answer.json()["data"][0]["id"] == "astrolabe-teacher"
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    assert "Traceback" not in process.stderr.read()


def test_options_are_flag_over_file_over_default(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('seed = 5\nlimit = 9\nshard = "1/3"\n[roles.judge]\nmodel = "big"\ntemperature = 0\n')
    options = load_options(config, {"seed": 6, "limit": None})
    assert (options.seed, options.limit, options.shard) == (6, 9, (1, 3))
    assert options.roles["judge"].model == "big"
    assert options.select(list(range(40))) == [1, 4, 7, 10, 13, 16, 19, 22, 25]
    for wrong in ("limit = '9'", "seed = true", "temperature = 'hot'", "roles = 3", "shard = '3/3'"):
        config.write_text(wrong + "\n")
        with pytest.raises(UsageError):
            load_options(config, {})


@pytest.mark.parametrize(
    "line",
    [
        "temperature = nan",
        "temperature = -1",
        "top_p = 7",
        "top_p = 0",
        "max_tokens = 0",
        "timeout_s = 0",
        "timeout_s = inf",
        "limit = 0",
        "limit = -1",
        "concurrency = 0",
        "min_tools = -1",
        "defect_rate = 7.5",
    ],
)
def test_a_number_out_of_its_range_is_named_from_the_file_and_the_flag(tmp_path, line):
    config, (key, _, value) = tmp_path / "run.toml", line.partition(" = ")
    config.write_text(line + "\n")
    with pytest.raises(UsageError, match=f"`{key}` is "):
        load_options(config, {})
    with pytest.raises(UsageError, match=f"`{key}` is "):
        load_options(None, {key: float(value)})
    if key in {"temperature", "top_p", "max_tokens", "timeout_s"}:
        config.write_text(f"[roles.judge]\n{line}\n")
        with pytest.raises(UsageError, match=rf"\[roles\.judge\] `{key}` is "):
            load_options(config, {})


def test_an_unknown_role_is_named_with_the_closest_and_every_agent_has_its_role(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('[roles.jugde]\nmodel = "m"\n')
    with pytest.raises(UsageError, match=r"no role 'jugde'.*the closest is 'judge'"):
        load_options(config, {})
    from agents import decomposer, emulator, planner, verifier
    from agents.base import Agent
    from agents.judges import final_answer

    modules = (decomposer, emulator, planner, verifier, final_answer)
    roles = {value.role for module in modules for value in vars(module).values() if isinstance(value, Agent)}
    assert {*roles, "policy"} == set(ROLES)


def test_shards_divide_the_inputs():
    inputs = list(range(11))
    parts = [SynthOptions(shard=parse_shard(f"{i}/3")).select(inputs) for i in range(3)]
    assert sorted(x for part in parts for x in part) == inputs
    for wrong in ("3/3", "1", "-1/2", "a/b", "1/0"):
        with pytest.raises(UsageError):
            parse_shard(wrong)


def test_a_configured_judge_of_its_own_generations_is_refused_unless_told(tmp_path):
    config = tmp_path / "run.toml"
    text = 'model_url = "http://h/v1"\nmodel = "m"\n[roles.judge]\ntemperature = 0\n'
    config.write_text(text)
    with pytest.raises(UsageError, match="its own generations"):
        load_options(config, {})
    config.write_text("allow_self_judge = true\n" + text)
    assert load_options(config, {}).allow_self_judge
    for address in ("http://H:80", "http://h/v1/"):
        config.write_text(text + f'model_url = "{address}"\n')
        with pytest.raises(UsageError, match="its own generations"):
            load_options(config, {})
    config.write_text(text + 'model = "another"\n')
    load_options(config, {})


PROGRESS = """
import time
from astrolabe.progress import track
with track("things", 40) as bar:
    for _ in range(40):
        time.sleep(0.06)
        bar.advance(1, "accepted 7")
"""


def test_progress_is_a_bar_with_rate_and_rest_on_a_terminal_and_lines_elsewhere():
    plain = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, timeout=30)
    assert plain.stdout == ""
    assert re.search(r"things: \d+/40 · \d+\.\d/s · \d:\d\d left · accepted 7", plain.stderr)
    ours, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRESS], stderr=side, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(side)
    shown = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 0.2)
        try:
            data = os.read(ours, 65536) if ready else b""
        except OSError:  # the other side is closed
            break
        shown += data
        if not data and process.poll() is not None:
            break
    assert process.wait(timeout=10) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"things .*\d+/40 \d+\.\d/s 0:00:0\d", text), text


def test_nothing_is_shown_of_quick_work():
    quick = "from astrolabe.progress import track\nwith track('x', 2) as bar:\n    bar.advance(); bar.advance()\n"
    done = subprocess.run([sys.executable, "-c", quick], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""


def test_data_goes_through_a_closed_pipe_without_a_traceback(tmp_path):
    RunStore.open(tmp_path / "run", verb="v", config={}, seed=0).close()
    command = f"{' '.join(ASTROLABE)} status {tmp_path / 'run'} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert Path(tmp_path / "run").exists()
