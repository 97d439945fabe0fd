"""Tables of serving, from the records of tools/bench_serving.py and tools/bench_pages.py."""
from result_records import grid, load, microseconds


def rows_of(name, part):
    return [row for row in load(name)["rows"] if row["part"] == part]


def keys_of(row):
    return f"pages of {row['page_size']}" if row["page_size"] else "contiguous"


def mixed(name):
    """Lengths beside equal ones of the same mean."""
    lines = [[str(row["batch"]), str(row["keys"]), keys_of(row), row["lengths"], microseconds(row["time_median_s"]), f"{row['bytes_per_s'] * 1e-12:.2f}", f"{row['of_equal']:.2f}"]
             for row in rows_of(name, "mixed")]
    return grid(["batch", "keys of all", "cache", "lengths", "us", "TB/s", "of equal"], lines)


def pages(name):
    lines = [[str(row["batch"]), keys_of(row), microseconds(row["time_median_s"]), f"{row['over_contiguous']:.2f}"] for row in rows_of(name, "pages")]
    return grid(["batch", "keys", "us", "over contiguous"], lines)


def pages_with_launch(name):
    """Calls of the command line, not replays of a graph."""
    lines = [[row["call"], keys_of(row), microseconds(row["time_median_s"]), f"{row['over_contiguous']:.2f}"] for row in load(name)["rows"]]
    return grid(["call", "keys", "us", "over contiguous"], lines)


def append(name):
    lines = [[str(row["batch"]), keys_of(row), microseconds(row["time_median_s"] - row["over_alone_s"]), microseconds(row["time_median_s"]), f"{1e6 * row['over_alone_s']:.1f}"]
             for row in rows_of(name, "append") if row["call"] == "append"]
    return grid(["batch", "keys", "decode alone, us", "with append", "over alone, us"], lines)


def cascade(name):
    lines = [[f"{row['batch']} x {row['own']} behind {row['prefix']}", row["call"], microseconds(row["time_median_s"]), f"{row['speedup']:.2f}x"] for row in rows_of(name, "cascade")]
    return grid(["sequences", "call", "us", "times as fast"], lines)


def prefill(name):
    lines = [[keys_of(row), row["algorithm"], microseconds(row["time_median_s"]), f"{row['over_contiguous']:.2f}"] for row in rows_of(name, "prefill")]
    return grid(["keys", "algorithm", "us", "over contiguous by v2"], lines)


def blocks(name="h200-serving"):
    """The marks of the page of decode with what stands between them."""
    return {f"serving-{part.__name__}": part(name) for part in (mixed, pages, append, cascade, prefill)}
