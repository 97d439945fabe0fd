"""A font for every character of a figure: matplotlib's own has no Chinese, and would draw boxes."""

import functools
import re
import warnings

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

# Traditional Chinese before others, whose shapes of some characters differ.
_FAMILIES = ("Noto Sans CJK TC", "Noto Sans TC", "Source Han Sans TC", "PingFang TC", "Microsoft JhengHei", "Heiti TC", "Noto Sans CJK HK", "Noto Sans CJK JP",
             "Noto Sans CJK SC", "Noto Sans JP", "Noto Sans SC", "Source Han Sans", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "WenQuanYi Zen Hei",
             "WenQuanYi Micro Hei", "Droid Sans Fallback", "AR PL UMing TW", "Noto Serif CJK TC", "Noto Serif CJK JP", "Arial Unicode MS")
_LIKELY = re.compile(r"cjk|han-?(sans|serif)|noto.*(tc|hk|jp|sc)\b|wqy|wenquanyi|uming|ukai|jhenghei|msjh|yahei|msyh|pingfang|heiti|hiragino|fallback", re.IGNORECASE)


@functools.lru_cache(maxsize=32)
def _characters_of(file: str) -> frozenset[int]:
    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):  # a file that has gone, or that FreeType does not read
        return frozenset()


def _lacks(file: str, text: str) -> bool:
    there = _characters_of(file)
    return any(ord(letter) not in there for letter in text if not letter.isspace())


def _font_with(text: str) -> FontProperties | None:
    """A font that has all of the text; first those that matplotlib knows, then the system's files, which may be newer than its list."""
    known = font_manager.fontManager.ttflist
    for family in _FAMILIES:
        for entry in known:
            if entry.name == family and not _lacks(entry.fname, text):
                return FontProperties(family=[family])
    files = {entry.fname for entry in known if _LIKELY.search(entry.name)} | {file for file in font_manager.findSystemFonts() if _LIKELY.search(file)}
    for file in sorted(files):
        if not _lacks(file, text):
            return FontProperties(fname=file)
    return None


def give_every_character_a_font(figure: Figure, required: bool) -> None:
    """Sets another font where a text has characters that its own lacks. Text is text: a `$` in a name begins no formula.

    Raises:
        RuntimeError: `required`, and no font has them. Else a warning says so.
    """
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    lacking: list[Text] = []
    for text in texts:
        text.set_parse_math(False)
        if _lacks(font_manager.findfont(text.get_fontproperties()), text.get_text()):
            lacking.append(text)
    if not lacking:
        return
    letters = "".join(sorted({letter for text in lacking for letter in text.get_text()}))
    font = _font_with(letters)
    if font is None:
        message = (f"no installed font has all of the characters {_strange(letters)!r}. Install one with Chinese: `apt-get install fonts-noto-cjk` (Debian, Ubuntu), "
                   "`dnf install google-noto-sans-cjk-fonts` (Fedora), or Noto Sans TC of fonts.google.com in ~/.local/share/fonts; then draw again")
        if required:
            raise RuntimeError(message + ". lang='en' needs none")
        warnings.warn(message, stacklevel=3)
        return
    for text in lacking:
        replacement = font.copy()
        replacement.set_size(text.get_fontsize())
        replacement.set_weight(text.get_fontweight())
        text.set_fontproperties(replacement)


def _strange(letters: str) -> str:
    return "".join(letter for letter in letters if ord(letter) > 0x7E)[:24]
