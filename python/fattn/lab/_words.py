"""What figures say, in English and in Traditional Chinese."""

LANGUAGES = ("en", "zh-TW")

# In a language's own order: a sentence is never put together from parts that another language would turn around.
_CHINESE = {
    "Forward": "前向",
    "Backward": "反向",
    "Forward and backward": "前向加反向",
    "{pass_}: time": "{pass_}：時間",
    "{pass_}: peak extra memory": "{pass_}：額外記憶體峰值",
    "{pass_}: throughput": "{pass_}：吞吐量",
    "{pass_}: FLOP/s": "{pass_}：FLOP/s",
    "{pass_}: speed-up over {baseline}": "{pass_}：相對 {baseline} 的加速比",
    "{pass_}: speed-up": "{pass_}：加速比",
    "{pass_}: how time grows with seqlen": "{pass_}：時間如何隨序列長度成長",
    "Speed-up over {baseline}": "相對 {baseline} 的加速比",
    "Extra memory, as a share of {baseline}'s": "額外記憶體佔 {baseline} 的比例",
    "seqlen": "序列長度",
    "batch": "批次大小",
    "nheads": "注意力頭數",
    "headdim": "每頭維度",
    "embed": "嵌入維度",
    "seqlen-k": "鍵的序列長度",
    "threads": "執行緒數",
    "causal": "因果遮罩",
    "mask": "遮罩",
    "pass": "階段",
    "{pass_}, causal": "{pass_}，因果",
    "median time of a call": "一次呼叫的時間中位數",
    "bytes over the inputs": "輸入以外的位元組",
    "FLOP/s": "FLOP/s",
    "tokens/s": "token/s",
    "times as fast": "倍速",
    "share": "比例",
    "as fast as {baseline}": "與 {baseline} 一樣快",
    "the documents, another GPU: 9x forward": "文件（另一種 GPU）：前向 9x",
    "and 4.5x backward": "反向 4.5x",
    "the documents: 14 %": "文件：14 %",
    "ceiling measured here: {peak} ({rate}FLOP/s)": "同機實測上限：{peak}（{rate}FLOP/s）",
    "slope 2: seqlen^2, as the operations": "斜率 2：seqlen^2，與運算量相同",
    "slope 1: seqlen, as the operations": "斜率 1：seqlen，與運算量相同",
    "{contestant}: seqlen^{exponent} (95 %: {low} to {high})": "{contestant}：seqlen^{exponent}（95 %：{low} 至 {high}）",
    "{contestant}: too few lengths for an exponent": "{contestant}：長度太少，無法估計指數",
    "out of memory": "記憶體不足",
    "would take too long": "耗時過久",
    "not supported": "不支援",
    "not installed": "未安裝",
    "beyond its error bound": "超出誤差界限",
    "refused: its time cannot be true": "拒絕：時間不可能為真",
    "failed": "執行失敗",
    "{contestant}: {what} at {values}": "{contestant}：{what}（{values}）",
    "{contestant}: {what}": "{contestant}：{what}",
    "nothing was measured": "沒有測量結果",
    "{baseline} was not measured, so there is no speed-up": "未測量 {baseline}，因此沒有加速比",
    "nothing was measured together with {baseline}": "沒有與 {baseline} 一同測得的結果",
    "Attention by {axis}: {problem}, on {device}": "不同{axis}下的注意力：{problem}，{device}",
    "Medians of checked results; bands and whiskers: 95 % intervals, of ratios from the ends of both. \"?\": undecided. Memory is what a call adds to its inputs.":
        "已驗證結果的中位數；帶與鬚線為 95 % 區間，比值者取兩個區間的端點。「?」：無法判定。記憶體為一次呼叫在輸入之外增加的量。",
    "The measurement is not complete.": "測量尚未完成。",
}

_FAILURES = {"out_of_memory": "out of memory", "timeout": "would take too long", "unsupported": "not supported", "unavailable": "not installed",
             "check_failed": "beyond its error bound", "refused": "refused: its time cannot be true", "failed": "failed"}
_PASSES = {"fwd": "Forward", "bwd": "Backward", "fwdbwd": "Forward and backward"}


class Words:
    """Raises ValueError for a language that is not there."""

    def __init__(self, lang: str):
        if lang not in LANGUAGES:
            raise ValueError(f"lang is '{str(lang)[:40]}'; allowed: {', '.join(LANGUAGES)}")
        self.chinese = lang == "zh-TW"

    def __call__(self, text: str, **values: object) -> str:
        return (_CHINESE[text] if self.chinese else text).format(**values)

    def pass_(self, name: str) -> str:
        return self(_PASSES[name])

    def failure(self, status: str) -> str:
        return self(_FAILURES.get(status, "failed"))

    def joined(self, sentences: list[str]) -> str:
        if not sentences:
            return ""
        return "；".join(sentences) + "。" if self.chinese else "; ".join(sentences) + "."
