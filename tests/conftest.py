"""Configuration shared by all tests: 8 virtual CPU devices, golden texts, hypothesis profiles, the resumable soak.

JAX fixes its devices at first use. So they are configured here, before any test module is imported.

The soak is divided into chunks, each an ordinary test with its own seed. `--soak` appends the name of every slow test
that passed to `.soak/passed`, with a hash of the files that the test depends on, and deselects the recorded tests in
the next run. So an interrupted run resumes, and a change of code repeats only the tests that depend on it.
"""

import difflib
import gc
import linecache
import os
import re
from pathlib import Path

import hypothesis
import jax
import pytest
from depends import digest

from weft.core.errors import WeftError

# Tests spend most of their time compiling, and run the compiled code once. So LLVM's optimizations are turned off; HLO
# passes, which decide the collectives, are unchanged.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]
# Without the fusion emitters, compilation takes a third of the time. Later versions have no other emitters.
if jax.__version_info__ < (0, 11):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
# Tracing creates many objects and few reference cycles; collecting these as usual would take a tenth of the time.
gc.set_threshold(200_000, 20, 100)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOAK_PASSED = ROOT / ".soak" / "passed"
SOAK_CHUNK = 100  # examples in a chunk; fixed, so that a larger SOAK_EXAMPLES only adds chunks


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden texts")
    parser.addoption("--soak", action="store_true", help="leave out slow tests that already passed")


# -- hypothesis ------------------------------------------------------------------------------------

# No deadlines, because compile times vary, and no health check of the time it takes to draw a program.
_patient = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("default", **_patient, derandomize=bool(os.environ.get("CI")))
# The seed of a chunk determines its examples, so there is no example database.
hypothesis.settings.register_profile(
    "soak", **_patient, max_examples=SOAK_CHUNK, database=None, derandomize=False
)
hypothesis.settings.load_profile("default")  # --hypothesis-profile, read later, overrides this


# -- golden texts ----------------------------------------------------------------------------------


@pytest.fixture
def golden(golden_file):
    """`golden(name, text)` compares text with tests/messages/NAME.txt, or rewrites that file.

    `folder` is another folder under tests/.
    """
    return lambda name, text, folder="messages": golden_file(TESTS / folder / f"{name}.txt", text)


@pytest.fixture
def golden_file(request):
    """`golden_file(path, text)` compares text with a file, or rewrites it. Trailing whitespace is ignored."""
    update = request.config.getoption("--update-golden")

    def check(path, text):
        text = "".join(line.rstrip() + "\n" for line in text.rstrip().splitlines())
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        where = path.relative_to(ROOT)
        if not path.exists():
            pytest.fail(f"{where} is missing; --update-golden writes it. Its text now:\n{text}")
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = (expected.splitlines(), text.splitlines())
            diff = "\n".join(difflib.unified_diff(*lines, str(where), "now", lineterm=""))
            pytest.fail(f"{where} differs; if the new text is right, use --update-golden\n{diff}")

    return check


@pytest.fixture
def mistake(golden, request):
    """`mistake(name, call, folder)`: the call raises an error whose message has four parts.

    The message must point to a line of the test file that ends with `# wrong`. It is compared with a golden text, in
    which LINE replaces the line number.
    """

    def check(name, call, folder):
        with pytest.raises(WeftError) as caught:
            call()
        error = caught.value
        assert isinstance(error, ValueError | TypeError | ImportError)
        for part in ("call", "fact", "rule", "hint"):
            assert getattr(error, part), f"the message has no part: {part}\n{error}"
        file = request.path.relative_to(ROOT).as_posix()
        [(shown, line)] = re.findall(r"  at (\S+):(\d+)$", str(error), re.MULTILINE)
        source = linecache.getline(str(request.path), int(line))
        assert Path(shown).resolve() == request.path, error
        # The path is relative if the file is inside the current folder.
        assert Path(shown).is_absolute() != request.path.is_relative_to(Path.cwd()), error
        assert source.rstrip().endswith("# wrong"), f"{source}\n{error}"
        text = re.sub(r"  at \S+:\d+$", f"  at {file}:LINE", str(error), flags=re.MULTILINE)
        golden(name, f"{type(error).__name__}: {text}", folder)

    return check


# -- the soak --------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc):
    """A test that takes `soak_chunk` runs once per chunk of SOAK_EXAMPLES examples."""
    if "soak_chunk" in metafunc.fixturenames:
        examples = int(os.environ.get("SOAK_EXAMPLES", SOAK_CHUNK))
        metafunc.parametrize("soak_chunk", range(-(-examples // SOAK_CHUNK)))


@pytest.fixture
def soak(soak_chunk):
    """`soak(check, strategies…)` runs `check` on one chunk of examples, seeded by the chunk's number."""

    def run(check, *strategies, **named_strategies):
        test = hypothesis.given(*strategies, **named_strategies)(check)
        profile = hypothesis.settings.get_profile("soak")
        hypothesis.seed(soak_chunk)(hypothesis.settings(profile)(test))()

    return run


def _soak_line(nodeid):
    """The record of a passed test: a hash of all code that its outcome depends on, and its name."""
    return f"{digest(ROOT / nodeid.split('::')[0])} {nodeid}"


def pytest_configure(config):
    if not config.getoption("--soak"):
        return
    if hasattr(config, "workerinput"):  # an xdist worker; all workers must collect the same tests
        config.soak_passed = frozenset(config.workerinput["soak_passed"])
    else:
        lines = SOAK_PASSED.read_text().splitlines() if SOAK_PASSED.exists() else []
        config.soak_passed = frozenset(lines)
        config.pluginmanager.register(_SoakRecorder())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Send a worker the record as it was when the run began."""
    if node.config.getoption("--soak"):
        node.workerinput["soak_passed"] = sorted(node.config.soak_passed)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--soak"):
        return
    done = [item for item in items if _soak_line(item.nodeid) in config.soak_passed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in set(done)]


class _SoakRecorder:
    """Appends each slow test to the record as soon as it passes."""

    def pytest_sessionfinish(self, session, exitstatus):
        # If all tests passed earlier, none is left to run: that is success, not "no tests collected".
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.soak_passed:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed and "slow" in report.keywords:
            SOAK_PASSED.parent.mkdir(exist_ok=True)
            with SOAK_PASSED.open("a") as record:
                record.write(_soak_line(report.nodeid) + "\n")
