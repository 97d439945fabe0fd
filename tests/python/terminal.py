"""A terminal for tests: what a command writes to one, and what is typed there."""
import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time


class Terminal:
    """A command on a terminal of so many columns. The terminal's own end stays open here until all is read: where nobody has it open any more, what was
    written last may be lost."""

    def __init__(self, command: list, width: int = 80, env: dict | None = None, stdin=None, stdout=None):
        """stdin and stdout: of subprocess; the terminal itself where there are none."""
        self._main, self._end = pty.openpty()
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        surroundings = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm", **(env or {})}
        self.process = subprocess.Popen(list(map(str, command)), stdin=self._end if stdin is None else stdin,
                                        stdout=self._end if stdout is None else stdout, stderr=self._end, env=surroundings)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")  # a piece may end inside a character
        self._start = time.monotonic()
        self.pieces: list[tuple[float, str]] = []  # seconds since the start, and what came then

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._end)

    def write(self, text: bytes) -> None:
        os.write(self._main, text)

    def _read(self, seconds: float) -> str:
        if not select.select([self._main], [], [], seconds)[0]:
            return ""
        piece = self._decoder.decode(os.read(self._main, 1 << 16))
        self.pieces.append((time.monotonic() - self._start, piece))
        return piece

    def until(self, words: str, timeout: float = 120) -> str:
        """What comes, up to these words."""
        text, end = "", time.monotonic() + timeout
        while words not in text:
            assert time.monotonic() < end, text
            text += self._read(0.1)
        return text

    def rest(self, timeout: float = 120) -> str:
        """What comes until the command has ended."""
        text, end = "", time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < end, text
            text += self._read(0.1)
        # What was written before this mark comes before it. The terminal takes it once what it holds is read.
        mark = "\x1a end \x1a"
        while piece := self._read(0):
            text += piece
        os.write(self._end, mark.encode())
        while mark not in text:
            assert time.monotonic() < end, text
            text += self._read(0.1)
        while mark and self.pieces:  # it may have come in several reads
            at, piece = self.pieces.pop()
            kept = max(len(piece) - len(mark), 0)
            mark = mark[: max(len(mark) - len(piece), 0)]
            if kept:
                self.pieces.append((at, piece[:kept]))
        return text.removesuffix("\x1a end \x1a")
