"""`weft serve`: a trained model behind HTTP."""

from __future__ import annotations

import ipaddress
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from .generation import check_single_process, report_mesh_fallback
from .targets import CommandFailure, UsageError

TOKEN_VARIABLE = "WEFT_SERVE_TOKEN"

# The least that a flag may be, and the most.
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "rows": (1, 2**20),
    "longest": (2, 2**20),
    "stride": (1, 2**20),
    "average": (1, 2**20),
    "most_waiting": (1, 2**31 - 1),
    "timeout": (0.001, 1e6),
    "body_limit": (1, 2**40),
}


@dataclass
class ServeCommand:
    """Let a trained model answer requests over HTTP, many at once.

    FOLDER is that of a run of weft train, or one of Hugging Face with a model and its tokenizer.
    There is a page to try it at /, and POST /v1/completions (as OpenAI's), /translate and /score for
    programs; GET /healthz and /metrics for those who watch.

        weft serve runs/translate
        weft serve runs/lm --port 0 --rows 32 --mesh data=4 --layout batch:data
        weft serve runs/lm --host 0.0.0.0 --token-file token.txt

    Only this machine can reach it unless --host says otherwise. With --token-file, or a token in the
    environment as WEFT_SERVE_TOKEN, requests have to bring it: Authorization: Bearer TOKEN. SIGTERM and
    SIGINT end the server when it has finished what it accepted."""

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder of a run, or one of Hugging Face."""
    port: Annotated[int, arg(metavar="N")] = 8000
    """The port; 0 is any that is free, and is printed."""
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1"
    """The address to listen at."""
    rows: Annotated[int, arg(metavar="N")] = 16
    """How many texts are said at once; memory grows with it, and answers don't depend on it."""
    longest: Annotated[int, arg(metavar="TOKENS")] = 256
    """How many tokens a text may have, and an answer (a language model's: both together)."""
    stride: Annotated[int, arg(metavar="N")] = 8
    """How many tokens are said between two looks at who waits."""
    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Which checkpoint; by default the newest."""
    average: Annotated[int, arg(metavar="N")] = 1
    """The mean of the parameters of so many checkpoints, that one and those before it."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """The processor mesh, "data=4 model=2"; "" is one device. By default that of training, if there are as
    many devices, else one."""
    layout: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """The layout; by default that of training."""
    token_file: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """A file with the token that requests have to bring."""
    most_waiting: Annotated[int, arg(metavar="N")] = 256
    """How many texts may wait; more are refused with 503."""
    timeout: Annotated[float, arg(metavar="SECONDS")] = 60.0
    """How long an answer may take, a client to read on, and the server to end."""
    body_limit: Annotated[int, arg(metavar="BYTES")] = 1 << 20
    """How long a request may be."""

    def run(self) -> None:
        """Serve until a signal."""
        self._check()
        token = self._token()
        from ..generate import TextGenerator
        from ..serve import build_app, listen_socket, serve
        from ..train import load

        check_single_process()
        found = load.load_run(self.folder, self.step, self.average, self.mesh, self.layout)
        report_mesh_fallback(found, self.mesh)
        speaker = TextGenerator(
            found.model, found.tokenizer, found.mesh, found.layout, rows=self.rows, longest=self.longest
        )
        made = build_app(
            speaker,
            name=Path(self.folder).resolve().name,
            token=token,
            timeout=self.timeout,
            body_limit=self.body_limit,
            stride=self.stride,
            most_waiting=self.most_waiting,
        )
        try:
            listening = listen_socket(self.host, self.port)
        except OSError as error:
            raise CommandFailure(
                f"error: can't listen at {self.host}, port {self.port}\n"
                f"  {getattr(error, 'strerror', None) or error}\n"
                "  the address is one of this machine's, and the port nobody else's\n\n"
                "hint: --port 0 takes any that is free, and prints it"
            ) from None
        if token is None and not _is_loopback(self.host):
            print(
                f"warning: anyone who can reach {self.host} may use this server; with --token-file "
                "only those who have the token may",
                file=sys.stderr,
            )
        shown = f"[{self.host}]" if ":" in self.host else self.host
        url = f"http://{shown}:{listening.getsockname()[1]}"
        print(f"compiling; will listen on {url}", file=sys.stderr, flush=True)

        def ready() -> None:
            print(f"serving {self.folder} on {url}", file=sys.stderr, flush=True)

        if not serve(made, listening, self.timeout, ready):
            raise made.state.engine.failure

    def _check(self) -> None:
        wrong = [
            f"--{name.replace('_', '-')} {getattr(self, name)}: it is from {least:,} to {most:,}"
            for name, (least, most) in RANGES.items()
            if not least <= getattr(self, name) <= most
        ]
        if wrong:
            raise UsageError(*wrong, hint="weft serve --help says what each is")

    def _token(self) -> str | None:
        """The token, from a file or the environment: what is on the command line can be read by others."""
        if self.token_file is None:
            text, where = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
            if text is None:
                return None
        else:
            where = str(self.token_file)
            try:
                text = self.token_file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"--token-file {where} can't be read",
                    getattr(error, "strerror", None) or "it is not UTF-8",
                    rule="it is a file with one word, the token",
                    hint="openssl rand -hex 16 > token.txt makes one",
                ) from None
        token = text.strip()
        if not token or not token.isascii() or len(token.split()) > 1:
            raise UsageError(
                f"there is no token in {where}",
                rule="it is one word of ASCII, such as 32 hex digits",
                hint="openssl rand -hex 16 makes one",
            )
        return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
