"""fattn.lab: frames of the records in docs/results and of broken ones, and the figures drawn from them."""

import json
import math
import pathlib
import subprocess
import sys
import warnings

import pytest

pd = pytest.importorskip("pandas", minversion="2.0")
np = pytest.importorskip("numpy")

import fattn.lab as lab  # noqa: E402
from fattn.lab import _growth  # noqa: E402

RESULTS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "results"
LENGTHS = sorted(RESULTS.glob("h200-algorithms-b4-s*.json"))


def row(**changes) -> dict:
    base = {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "nheads": 2, "nheads_k": 2, "headdim": 32, "headdim_v": 32, "causal": False, "dtype": "fp32", "seed": 1,
            "pass": "fwd", "provider": "fattn", "backend": "cpu", "algorithm": "v2", "device": "cpu", "version": "0.1.0", "kernel": "k", "isa": None, "threads": 2,
            "status": "ok", "reason": None, "time_median_s": 2e-3, "time_ci_low_s": 1.9e-3, "time_ci_high_s": 2.1e-3, "flops_per_s": 1e9, "extra_bytes": 4096,
            "peak": "FMA", "peak_flops_per_s": 1e11, "checks": [], "warnings": []}
    return base | changes


def failed(status: str, **changes) -> dict:
    gone = dict.fromkeys(("time_median_s", "time_ci_low_s", "time_ci_high_s", "flops_per_s", "extra_bytes"))
    return row(status=status, reason=f"because of {status}", **gone) | changes


def record(rows: list[dict], **changes) -> dict:
    return {"fattn_record": 1, "command": "compare", "flags": [], "status": "ok", "complete": True, "environment": {"cpu": {"model": "A CPU"}}, "peaks": {},
            "rows": rows, "summary": []} | changes


def sweep_rows(over: str, values: list[int], seconds, **changes) -> list[dict]:
    """standard takes seconds(value), fattn half of it."""
    rows = []
    for value in values:
        for name, part in (("standard", 1.0), ("fattn", 0.5)):
            time = seconds(value) * part
            size = {"seqlen": {"seqlen_q": value, "seqlen_k": value}, "batch": {"batch": value}, "nheads": {"nheads": value, "nheads_k": value}}[over]
            rows.append(row(value=value, contestant=name, provider=name, algorithm=name if name == "standard" else "v2", time_median_s=time, time_ci_low_s=time * 0.99,
                            time_ci_high_s=time * 1.02, extra_bytes=int(1000 * value / part), **size, **changes))
    return rows


def sweep_record(over: str, rows: list[dict], **changes) -> dict:
    swept = {"preset": None, "over": over, "values": sorted({r["value"] for r in rows}), "fix": None, "passes": ["fwd"], "contestants": ["standard", "fattn"],
             "baseline": "standard", "problem": "", "device": "A CPU"}
    return {"fattn_sweep": 1, "command": "sweep", "flags": [], "status": "ok", "complete": True, "environment": {"cpu": {"model": "A CPU"}}, "sweep": swept,
            "peaks": {}, "disturbance": None, "rows": rows, "fits": [], "findings": ["It is so."]} | changes


def test_rows_of_several_records():
    frame = lab.read(LENGTHS)
    rows = [one for path in LENGTHS for one in json.loads(path.read_text())["rows"]]
    assert len(frame) == len(rows) and list(frame["time_median_s"]) == [one["time_median_s"] for one in rows]
    assert list(frame["contestant"].unique()) == ["standard", "v1", "v2", "v3"] and set(frame["file"]) == {str(path) for path in LENGTHS}
    assert (frame["env_gpu_name"] == "NVIDIA H200").all() and frame["env_cpu_logical_cpus"].dtype == "int64" and frame["env_date"].dt.year.eq(2026).all()
    assert frame["extra_bytes"].dtype == "int64" and frame["causal"].dtype == "bool" and frame["rss_extra_bytes"].isna().all()
    worst = [max(check["error"] / check["allowed"] for check in one["checks"]) for one in rows]
    assert np.allclose(frame["error_fraction"], worst) and len(frame["checks"].iloc[0]) == len(rows[0]["checks"])
    assert list(lab.read(str(RESULTS / "h200-algorithms-b4-s*.json"))["flops"]) == list(frame.sort_values("file", kind="stable")["flops"])


def test_every_record_in_the_repository():
    count = 0
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and {"fattn_record", "fattn_sweep", "fattn_predict"} & set(content):
            assert len(lab.read(path)) == len(content["rows"])
            count += 1
        elif isinstance(content, dict) and {"fattn_memory", "fattn_calibration"} & set(content):
            assert len(lab.read(path)) > 0
        elif path.name in ("accuracy.json", "h200-accuracy-v2.json", "values.json", "h200-values-fp32.json", "h200-values-fp32-64.json"):
            assert len(lab.read(path)) == len(content) and len(lab.read(content)) == len(content)
        elif "records" in content:
            assert len(lab.read(path)) == sum(len(one["rows"]) for one in content["records"])
        else:
            with pytest.raises(lab.RecordError, match="is no record of fattn|which the lab does not read"):
                lab.read(path)
    assert count > 10


def test_whole_numbers_stay_whole_where_some_are_missing():
    frame = lab.read(record([row(window_left=2**53 + 1, alibi=True), row(contestant="x")]))
    assert frame["window_left"].dtype == "Int64" and frame["window_left"][0] == 2**53 + 1 and frame["window_left"].isna()[1] and frame["alibi"].dtype == "boolean"


def test_failures_stay_rows():
    frame = lab.read(record([row(), failed("out_of_memory"), failed("check_failed", checks=[{"tensor": "o", "error": None, "allowed": 1e-6, "pass": False}])]))
    assert list(frame["status"]) == ["ok", "out_of_memory", "check_failed"] and frame["reason"][1] == "because of out_of_memory"
    assert list(frame["time_median_s"].isna()) == [False, True, True] and frame["error_fraction"][2] == math.inf


def test_other_kinds():
    measured = {"value": 2.0, "low": 1.9, "high": 2.1, "spread_fraction": 0.1, "samples": 5}
    calibration = {"fattn_calibration": 1, "device": "cpu", "machine": {}, "facts": {"threads": 2}, "measured": {"fma_flops_per_s": measured}, "seconds": 1.0,
                   "environment": {"cpu": {"model": "A CPU"}}}
    frame = lab.read(calibration)
    assert list(frame["name"]) == ["fma_flops_per_s", "threads"] and frame["high"][0] == 2.1 and frame["env_cpu_model"][0] == "A CPU"
    regress = {"fattn_regress": 1, "verdict": "worse", "margin_fraction": 0.01, "level": 0.99, "counts": {}, "rows": [{"problem": "B1", "verdict": "worse", "ratio": 1.2}]}
    assert lab.read(regress)["ratio"][0] == 1.2
    counted = {"algorithm": "v2", "reason": None, "moved_bytes": 10.0, "limits": [{"name": "latency", "seconds": None}], "binding": None, "bound_s": None}
    memory = {"fattn_memory": 1, "problem": {"batch": 1, "dtype": "fp32"}, "grad": False, "machine": {"device": "cpu", "name": "A CPU"},
              "passes": [{"pass": "fwd", "compulsory_bytes": 5.0, "algorithms": [counted, {"algorithm": "v3", "reason": "no GPU"}]}],
              "steps": [{"algorithm": "v2", "reason": None, "exact": True, "peak_bytes": 99}], "environment": {}}
    frame = lab.read(memory)
    assert list(frame["part"]) == ["moved", "moved", "step"] and frame["moved_bytes"][0] == 10 and frame["reason"][1] == "no GPU" and frame["peak_bytes"][2] == 99
    assert frame["bound_s"].dtype == "float64" and set(frame["machine_name"]) == {"A CPU"} and set(frame["dtype"]) == {"fp32"}
    predict = {"fattn_predict": 1, "what": "problem", "complete": True, "rows": [{"batch": 1, "pass": "fwd", "predicted_s": 1e-3, "measured_s": None}]}
    frame = lab.read(predict)
    assert frame["predicted_s"][0] == 1e-3 and frame["measured_s"].dtype == "float64" and frame["what"][0] == "problem"
    with pytest.raises(lab.RecordError, match="'passes' is missing"):
        lab.read({"fattn_memory": 1})
    with pytest.raises(lab.RecordError, match="kind fattn_calibration.*kind fattn_regress"):
        lab.read([calibration, regress])
    with pytest.raises(ValueError, match="no column 'contestant'"):
        lab.figure(calibration)


@pytest.mark.parametrize(("content", "message"), [
    ("", "is empty"),
    (json.dumps(record([row()]))[:-40], "is no JSON, or a part of it is missing"),
    (json.dumps(record([row(time_median_s=math.nan)])), "NaN is no JSON"),
    (b"\xff\xfe\x00{", "is no JSON"),
    ("[" * 100000, "nested too deeply|is no JSON"),
    ("[1, 2]", "is no record of fattn but a list of something else"),
    ("{}", "no key names its kind"),
    ('"text"', 'is no record of fattn but "text"'),
    ('{"fattn_info": 1}', "of kind 'fattn_info', which the lab does not read"),
    (json.dumps(record([row()], fattn_record=2)), "fattn_record of version 2; this package reads version 1"),
    (json.dumps(record([row()], fattn_record=True)), "of version true"),
    (json.dumps(record([])), "has no rows: nothing was measured"),
    (json.dumps(record(["row"])), "'rows' is .*; a list of objects is wanted"),
    (json.dumps(record([row(time_median_s="2 ms")])), r'rows\[0\].time_median_s is "2 ms"; a time above 0'),
    (json.dumps(record([row(time_median_s=0)])), "a time above 0"),
    (json.dumps(record([row(time_ci_low_s=3e-3)])), "an interval around the median"),
    (json.dumps(record([row(), row(batch="4")])), r'rows\[1\].batch is "4"; a whole number'),
    (json.dumps(record([failed("timeout", time_median_s=1.0)])), "the status 'timeout' and a time"),
    (json.dumps(record([row()], fattn_sweep=1) | {"fattn_record": None}), "of version null"),
    (json.dumps(sweep_record("seqlen", sweep_rows("seqlen", [8], float), sweep={})), "'sweep' does not say what was swept"),
])
def test_broken_files(tmp_path, content, message):
    path = tmp_path / "record.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(lab.RecordError, match=message) as error:
        lab.read(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 500 + len(str(path))


def test_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        lab.read(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        lab.read(str(tmp_path / "*.json"))
    with pytest.raises(IsADirectoryError, match="is a folder"):
        lab.read(tmp_path)
    with pytest.raises(lab.RecordError, match="the list is empty"):
        lab.read([])
    with pytest.raises(TypeError, match="source is a int"):
        lab.read(3)


@pytest.mark.parametrize(("degrees", "half"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (10, 2.2281), (29, 2.0452), (120, 1.9799)])
def test_student_t(degrees, half):
    assert _growth.student_t(degrees) == pytest.approx(half, abs=1e-4)


def test_growth():
    frame = lab.read(LENGTHS)
    fits = lab.growth(frame, over="seqlen").set_index(["contestant", "pass"])
    part = frame[(frame["contestant"] == "v2") & (frame["pass"] == "bwd")]
    (slope, offset), covariance = np.polyfit(np.log(part["seqlen_q"]), np.log(part["time_median_s"]), 1, cov=True)
    fit = fits.loc[("v2", "bwd")]
    assert fit["exponent"] == pytest.approx(slope) and fit["factor"] == pytest.approx(math.exp(offset)) and fit["points"] == 5
    assert fit["exponent_high"] - fit["exponent"] == pytest.approx(3.1824 * math.sqrt(covariance[0, 0]), rel=1e-3)
    few = lab.growth(sweep_record("seqlen", sweep_rows("seqlen", [64, 128], lambda n: n**2 * 1e-6)))
    assert few["exponent"].isna().all() and set(few["reason"]) == {"2 values were measured; 3 are needed"}


def test_without_pandas_or_matplotlib():
    code = "import sys; sys.modules['{0}'] = None; import fattn; assert ('lab' in dir(fattn)) == {1}; fattn.lab.{2}"
    for package, there, what in (("pandas", False, "read"), ("matplotlib", True, "figure")):
        done = subprocess.run([sys.executable, "-c", code.format(package, there, what)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 1 and "ImportError: fattn.lab" in done.stderr and "pip install 'fattn[lab]'" in done.stderr, done.stderr
    done = subprocess.run([sys.executable, "-c", "import sys, fattn; assert 'pandas' not in sys.modules; import fattn.lab; assert 'matplotlib' not in sys.modules"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_names():
    assert {"figure", "growth", "read", "sweep"} <= set(dir(lab)) and not [name for name in dir(lab) if name.startswith("_") and not name.startswith("__")]
    with pytest.raises(AttributeError, match="has no attribute 'plot'"):
        lab.plot
    assert all(getattr(lab, name).__doc__ for name in lab.__all__)


# Figures.


@pytest.fixture(scope="module")
def text_of():
    text = pytest.importorskip("matplotlib.text")

    def of(figure) -> str:
        return "\n".join(one.get_text() for one in figure.findobj(text.Text))

    return of


def titles(figure) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def test_figure_of_compared_lengths(text_of):
    frame = lab.read(LENGTHS)
    figure = lab.figure(frame, over="seqlen", pass_="fwd")
    assert titles(figure) == ["Forward: time", "Forward: peak extra memory", "Forward: speed-up over standard", "Forward: how time grows with seqlen", "Forward: FLOP/s"]
    time, memory, speedup, growth, rate = figure.axes
    part = frame[(frame["contestant"] == "v3") & (frame["pass"] == "fwd")].sort_values("seqlen_q")
    line = next(line for line in time.lines if line.get_label() == "v3")
    assert list(line.get_xdata()) == list(part["seqlen_q"]) and np.allclose(line.get_ydata(), part["time_median_s"])
    assert np.allclose(next(line for line in memory.lines if line.get_label() == "v3").get_ydata(), part["extra_bytes"])
    assert np.allclose(next(line for line in rate.lines if line.get_label() == "v3").get_ydata(), part["flops_per_s"])
    bars = sorted(bar.get_height() for bar in speedup.patches)
    assert np.allclose(bars, sorted(frame[(frame["pass"] == "fwd") & (frame["contestant"] != "standard")]["speedup_over_standard"]))
    assert len(time.collections) >= 8, "a band and whiskers for each contestant"
    fit = lab.growth(frame, over="seqlen").set_index(["contestant", "pass"]).loc[("v3", "fwd")]
    assert f"v3: seqlen^{fit['exponent']:.2f} (95 %: {fit['exponent_low']:.2f} to {fit['exponent_high']:.2f})" in text_of(figure)
    assert "slope 2: seqlen^2" in text_of(figure) and "ceiling measured here: wgmma" in text_of(figure) and "B4 H16 D64 fp16 causal, on NVIDIA H200" in text_of(figure)
    assert [time.get_xscale(), time.get_yscale(), growth.get_yscale(), rate.get_yscale()] == ["log", "log", "log", "linear"]


@pytest.mark.parametrize(("over", "kinds"), [("batch", ["time", "peak extra memory", "throughput"]), ("nheads", ["time", "FLOP/s", "peak extra memory"])])
def test_figure_of_a_sweep(over, kinds):
    rows = sweep_rows(over, [1, 2, 4], lambda n: 1e-3 * n) + sweep_rows(over, [1, 2, 4], lambda n: 3e-3 * n, **{"pass": "bwd"})
    figure = lab.figure(sweep_record(over, rows))
    assert titles(figure) == [f"{name}: {kind}" for name in ("Forward", "Backward") for kind in kinds]
    if over == "batch":
        line = next(line for line in figure.axes[2].lines if line.get_label() == "fattn")
        assert np.allclose(line.get_ydata(), [n * 128 / (0.5e-3 * n) for n in (1, 2, 4)])


def test_failures_are_words_and_no_numbers(text_of):
    rows = sweep_rows("seqlen", [256, 512, 1024, 2048], lambda n: n**2 * 1e-9)
    gone = [i for i, one in enumerate(rows) if one["contestant"] == "standard" and one["value"] >= 1024]
    for i in gone:
        rows[i] = failed("out_of_memory", **{key: rows[i][key] for key in ("value", "contestant", "provider", "seqlen_q", "seqlen_k")})
    figure = lab.figure(sweep_record("seqlen", rows))
    line = next(line for line in figure.axes[0].lines if line.get_label() == "standard")
    assert list(np.isnan(line.get_ydata())) == [False, False, True, True] and len(figure.axes[2].patches) == 2
    assert "standard: out of memory at 1024, 2048." in text_of(figure) and "standard: too few lengths for an exponent" in text_of(figure)
    assert text_of(figure).count("standard: out of memory") >= 4, "in place of each bar, too"
    everything = lab.figure(sweep_record("seqlen", [failed("unsupported", value=64, seqlen_q=64, seqlen_k=64, contestant="fattn")]))
    assert text_of(everything).count("nothing was measured") >= 4 and "fattn: not supported at 64" in text_of(everything)


def test_undecided_is_said(text_of):
    rows = sweep_rows("seqlen", [64, 128], lambda n: 1e-3)
    for one in rows:
        one["time_ci_low_s"], one["time_ci_high_s"] = one["time_median_s"] * 0.5, one["time_median_s"] * 1.5
    assert "2x ?" in text_of(lab.figure(sweep_record("seqlen", rows)))
    assert "2x ?" not in text_of(lab.figure(sweep_record("seqlen", sweep_rows("seqlen", [64, 128], lambda n: 1e-3))))


def test_causal(text_of):
    figure = lab.figure(lab.read(RESULTS / "h200-headline.json"), over="causal")
    assert titles(figure) == ["Speed-up over standard", "Extra memory, as a share of standard's"] and len(figure.axes[0].patches) == 18
    assert "8.06x" in text_of(figure) and "6.1 %" in text_of(figure) and "the documents" not in text_of(figure)
    headline = lab.figure(lab.read(RESULTS / "h200-headline.json").assign(preset="headline"), over="causal")
    assert "9x forward" in text_of(headline) and "the documents: 14 %" in text_of(headline) and headline.axes[0].get_ylim()[1] > 9


def test_incomplete_is_said(text_of):
    assert "The measurement is not complete." in text_of(lab.figure(sweep_record("batch", sweep_rows("batch", [1, 2], float), complete=False)))


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "over: what is on the horizontal axis.*seqlen_q, seqlen_k vary"),
    ({"over": "sequence"}, "over is 'sequence'; allowed: seqlen"),
    ({"over": "seqlen", "pass_": "forward"}, "pass_ is 'forward'; allowed: fwd, bwd, fwdbwd"),
    ({"over": "seqlen", "lang": "zh"}, "lang is 'zh'; allowed: en, zh-TW"),
    ({"over": "batch"}, "at batch 4 there are several problems; they differ in seqlen_q \\(1024, 2048, 4096, 512, ...\\)"),
])
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lab.figure(lab.read(LENGTHS), **arguments)


def test_rows_that_do_not_belong_together():
    frame = lab.read(LENGTHS)
    with pytest.raises(ValueError, match="2 rows are of standard, fwd, at seqlen 512; they are the same row twice"):
        lab.figure(pd.concat([frame, frame]), over="seqlen")
    with pytest.raises(ValueError, match=r"differ in dtype \(bf16, fp16\).*frame\[frame.dtype == 'bf16'\]|differ in dtype"):
        lab.figure(pd.concat([frame, frame.assign(dtype="bf16")]), over="seqlen")
    with pytest.raises(ValueError, match="no rows; was everything filtered away"):
        lab.figure(frame[frame["dtype"] == "fp64"], over="seqlen")
    with pytest.raises(ValueError, match="no row is of the pass 'bwd'; the frame has fwd"):
        lab.figure(frame[frame["pass"] == "fwd"], over="seqlen", pass_="bwd")
    assert titles(lab.figure(frame[frame["contestant"] != "standard"], over="seqlen", pass_="fwd"))[2] == "Forward: speed-up"


def test_names_are_text(tmp_path):
    rows = sweep_rows("batch", [1, 2], lambda n: 1e-3 * n)
    for one in rows:
        one["contestant"] = "<script>$x^$ \\frac" if one["contestant"] == "fattn" else "_standard"
    figure = lab.figure(sweep_record("batch", rows), title="$\\bad{")
    figure.savefig(tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    assert "<script" not in svg and "&lt;script&gt;$x^$" in svg and [text.get_text() for text in figure.legends[0].get_texts()] == ["_standard", "<script>$x^$ \\frac"]


def test_pyplot_is_left_alone():
    code = ("import sys, fattn.lab, matplotlib; before = matplotlib.rcParams.copy(); "
            f"figure = fattn.lab.figure({str(LENGTHS[0])!r}, over='batch', pass_='fwd'); "
            "assert figure._repr_png_().startswith(b'\\x89PNG'); assert matplotlib.rcParams.copy() == before; assert 'matplotlib.pyplot' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def font_with(text: str, path: pathlib.Path) -> pathlib.Path:
    """A font of boxes that has these characters."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    for point in ((900, 0), (900, 800), (100, 800)):
        pen.lineTo(point)
    pen.closePath()
    names = {ord(letter): f"u{ord(letter):04X}" for letter in text}
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    box = pen.glyph()
    builder.setupGlyf({name: box for name in [".notdef", *names.values()]})
    builder.setupHorizontalMetrics({name: (1000, 0) for name in [".notdef", *names.values()]})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Boxes", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return path


def draw_chinese(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = lab.figure(sweep_record("seqlen", sweep_rows("seqlen", [256, 512, 1024], lambda n: n**2 * 1e-9)), lang="zh-TW")
        figure.savefig(tmp_path / "figure.png", dpi=40)
    return figure


def only_these_fonts(monkeypatch, files):
    from matplotlib import font_manager

    from fattn.lab import _fonts

    monkeypatch.setattr(_fonts, "_FAMILIES", ())
    monkeypatch.setattr(_fonts, "_LIKELY", __import__("re").compile("boxes"))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda *_, **__: [str(file) for file in files])


def test_chinese_is_drawn(tmp_path):
    try:
        figure = draw_chinese(tmp_path)
    except RuntimeError as error:
        assert "fonts-noto-cjk" in str(error)
        pytest.skip("no font with Chinese is installed")
    assert figure.axes[0].get_xlabel() == "序列長度" and figure.axes[0].get_title(loc="left") == "前向：時間"


def test_matplotlib_warns_of_glyphs_that_are_missing(tmp_path):
    """What the test above relies on."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0.5, 0.5, "序列長度", fontfamily="DejaVu Sans")
    with pytest.warns(UserWarning, match="missing from"):
        figure.savefig(tmp_path / "boxes.png")


def test_a_font_that_matplotlib_does_not_know_yet(tmp_path, monkeypatch, text_of):
    from fattn.lab import _words

    letters = "".join(sorted(set("".join(_words._CHINESE.values()) + "".join(map(chr, range(0x20, 0x7F))) + "µ")))
    only_these_fonts(monkeypatch, [font_with(letters, tmp_path / "boxes.ttf")])
    figure = draw_chinese(tmp_path)
    assert figure.axes[0].xaxis.label.get_fontproperties().get_file() == str(tmp_path / "boxes.ttf")


def test_no_font_with_chinese(tmp_path, monkeypatch):
    only_these_fonts(monkeypatch, [])
    with pytest.raises(RuntimeError, match="no installed font has all of the characters.*apt-get install fonts-noto-cjk.*lang='en' needs none"):
        draw_chinese(tmp_path)
    with pytest.warns(UserWarning, match="no installed font"):
        lab.figure(sweep_record("batch", sweep_rows("batch", [1, 2], float)), title="序列長度")


def test_every_word_is_translated():
    import ast

    from fattn.lab import _words

    folder = pathlib.Path(lab.__file__).parent
    said = {node.args[0].value for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name) and node.func.id == "words" and node.args and isinstance(node.args[0], ast.Constant)}
    assert len(said) > 20 and said <= _words._CHINESE.keys()
    import string

    for english, chinese in _words._CHINESE.items():
        fields = [sorted(name for _, name, _, _ in string.Formatter().parse(text) if name) for text in (english, chinese)]
        assert fields[0] == fields[1], english
