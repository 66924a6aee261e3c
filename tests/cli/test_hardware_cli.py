"""`weft hardware`: list, show and measure profiles."""

import json

from commands import run, weft

from weft.hardware.profile import load_profile as load_hardware
from weft.hardware.profile import parse_profile

pytest_plugins = ["command_fixtures"]


def test_hardware_list_names_every_profile(folder, capsys):
    (folder / "config" / "weft").mkdir(parents=True)
    _, toml, _ = run(capsys, "hardware", "show", "h100")
    (folder / "config" / "weft" / "mine.toml").write_text(toml.replace('"h100"', '"mine"'))
    code, out, err = run(capsys, "hardware", "list")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert {"tpu-v2", "tpu-v6e", "b200", "cpu", "mine"} <= set(names) and names == sorted(names)
    code, out, _ = run(capsys, "hardware", "list", "--json")
    assert [machine["name"] for machine in json.loads(out)] == names


def test_hardware_show_prints_a_file_that_can_be_read_back(folder, capsys):
    code, out, err = run(capsys, "hardware", "show", "tpu-v5p")
    assert code == 0 and parse_profile(out).name == "tpu-v5p" and "tpu-v5p.toml" in err
    code, out, err = run(capsys, "hardware", "show", "h10")
    assert (code, out) == (2, "") and "did you mean h100?" in err


def test_hardware_measure_writes_a_profile(folder):
    done = weft("hardware", "measure", "--devices", "2")
    assert done.returncode == 0, done.stderr
    path = folder / "config" / "weft" / "cpu.toml"
    assert done.stdout.strip() == str(path)
    machine = load_hardware(path)
    assert machine.name == "cpu" and machine.shared_cores >= 1
    assert machine.peak("f32") > 1e8 and machine.network[0].bandwidth > 1e6
    assert [p.name for p in path.parent.iterdir()] == ["cpu.toml"]


def test_hardware_measure_with_one_device_is_a_mistake(folder, capsys):
    code, out, err = run(capsys, "hardware", "measure", "--devices", "1")
    assert (code, out) == (2, "") and "at least 2" in err
