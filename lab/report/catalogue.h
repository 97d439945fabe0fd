// The sentences of reports: X(name, English, Traditional Chinese as Taiwan writes it). {0}, {1}, ... are filled in; ** and ` are emphasis and code.
#pragma once

// clang-format off
#define FATTN_REPORT_TEXTS(X) \
  /* The page itself. */ \
  X(kTitle, "Attention, measured: {0}", "注意力機制的量測報告：{0}") \
  X(kSubtitle, "From {0} records of fattn {1}, measured {2}. Times are medians; every result was checked before it was timed, and what fails a check has no time.", \
    "依據 fattn {1} 的 {0} 份紀錄，量測於 {2}。時間皆為中位數；每個結果都先驗證正確才計時，未通過驗證者沒有時間。") \
  X(kContents, "Contents", "目錄") \
  X(kSkip, "Skip to the results", "直接看結果") \
  X(kTable, "Table", "表格") \
  X(kListComma, ", ", "、") \
  X(kListDot, " · ", "・") \
  X(kDateRange, "{0} to {1}", "{0} 至 {1}") \
  X(kRepeat, "Repeat it", "重現這些數字的指令") \
  X(kForward, "forward", "前向") \
  X(kBackward, "backward", "反向") \
  X(kBoth, "forward + backward", "前向＋反向") \
  X(kStandardAttention, "standard attention", "標準注意力") \
  X(kTorchStandard, "PyTorch's standard attention", "PyTorch 的標準注意力") \
  X(kThreads, "{0}, {1} threads", "{0}（{1} 個執行緒）") \
  /* In short. */ \
  X(kInShort, "In short", "結論") \
  X(kCardsOf, "**{0}**, {1}, beside {2}:", "**{0}**，{1}，相對於{2}：") \
  X(kCardTimes, "{0}×", "{0} 倍") \
  X(kCardFaster, "as fast, {0}", "{0}的速度") \
  X(kCardUndecided, "as fast, {0}: not decided", "{0}的速度：無法判定") \
  X(kCardMemory, "of the memory, {0}", "{0}的記憶體用量") \
  X(kCardOne, "{0} to {1} by the 95 % intervals", "由 95 % 區間得 {0} 至 {1}") \
  X(kCardBytes, "{0} instead of {1}", "{0}，而非 {1}") \
  X(kCardMany, "mean of {0} problems, {1} to {2}", "{0} 個問題的平均，{1} 至 {2}") \
  X(kShapes, "Problems are named by B (batch), S (sequence length; of queries/of keys), H (heads; of queries/of keys) and D (headdim).", \
    "問題的記號：B 為 batch、S 為序列長度（query／key）、H 為 head 數（query／key）、D 為 headdim。") \
  X(kFasterOne, \
    "On {0} in {1}, the {2} pass is **{3} times** as fast as {4} (between {5} and {6} by the 95 % intervals of both medians), at {7}.", \
    "在 {0} 上以 {1} 計算{2}時，速度為{4}的 **{3} 倍**（由兩個中位數的 95 % 區間得 {5} 至 {6}），問題為 {7}。") \
  X(kFasterMany, \
    "On {0} in {1}, the {2} pass is **{3} times** as fast as {4}, the geometric mean of {5} problems; the least is {6} ({7}), the most {8} ({9}).", \
    "在 {0} 上以 {1} 計算{2}時，{5} 個問題的幾何平均為{4}的 **{3} 倍**；最低 {6} 倍（{7}），最高 {8} 倍（{9}）。") \
  X(kSlowerOne, "On {0} in {1}, the {2} pass is **slower** than {4}: {3} times its speed (between {5} and {6}), at {7}.", \
    "在 {0} 上以 {1} 計算{2}時**較慢**：速度為{4}的 {3} 倍（{5} 至 {6} 之間），問題為 {7}。") \
  X(kUndecidedOne, "On {0} in {1}, neither the {2} pass of fattn nor that of {3} can be called faster: the intervals of their medians overlap, at {4}.", \
    "在 {0} 上以 {1} 計算{2}時，無法判定 fattn 與{3}何者較快：兩者中位數的區間重疊，問題為 {4}。") \
  X(kUndecidedMany, \
    "On {0} in {1}, it cannot be said whether the {2} pass is faster than {4}: the geometric mean of {5} problems is {3} times, and the intervals leave {6} to {7}.", \
    "在 {0} 上以 {1} 計算{2}時，無法判定是否比{4}快：{5} 個問題的幾何平均為 {3} 倍，而區間容許 {6} 至 {7} 倍。") \
  X(kSlowerMany, \
    "On {0} in {1}, the {2} pass is **slower** than {4}: {3} times its speed, the geometric mean of {5} problems (the intervals leave {6} to {7}).", \
    "在 {0} 上以 {1} 計算{2}時比{4}**慢**：速度為其 {3} 倍，是 {5} 個問題的幾何平均（區間容許 {6} 至 {7} 倍）。") \
  X(kTally, "It is faster in {0} of them, slower in {1}, undecided in {2} (the 95 % intervals of the two medians overlap).", \
    "其中 {0} 個較快、{1} 個較慢、{2} 個無法判定（兩者中位數的 95 % 區間重疊）。") \
  X(kTallyAll, "In each of them the 95 % intervals of the two medians lie apart.", "每一個問題中，兩者中位數的 95 % 區間都不重疊。") \
  X(kMemoryOne, "It needs **{0}** of the memory beside the inputs: {1} instead of {2}.", "輸入以外的記憶體只需 **{0}**：{1}，而非 {2}。") \
  X(kMemoryMany, "It needs **{0}** of the memory beside the inputs, a geometric mean ({1} to {2}).", "輸入以外的記憶體為其 **{0}**（幾何平均，{1} 至 {2}）。") \
  X(kNoRace, "These records hold no other contestant in the same run, so nothing is said about who is faster.", \
    "這些紀錄中沒有在同一次執行裡與其他實作比較，因此不對快慢下結論。") \
  X(kBestStands, "Where a record names algorithms (v1, v2, v3) and not fattn, which chooses among them, the fastest of them stands for it.", \
    "若紀錄指定了演算法（v1、v2、v3）而沒有自動選擇的 fattn，則以其中最快者代表。") \
  X(kChecked, \
    "{0} of {1} timed results were held against attention in float64 first; the largest error is {2} of what is allowed (twice the error of standard attention in the same " \
    "dtype, three times for gradients).", \
    "{1} 個計時結果中有 {0} 個先與 float64 的注意力比對；最大誤差為容許值的 {2}（容許值為同資料型別標準注意力誤差的兩倍，梯度為三倍）。") \
  /* Beside standard attention. */ \
  X(kBesideStandard, "Beside standard attention", "與標準注意力比較") \
  X(kBesideStandardText, "Standard attention writes all scores and weights to memory. fattn computes the same result in tiles and keeps none of them.", \
    "標準注意力會把所有分數與權重寫進記憶體；fattn 以分塊方式算出相同結果，完全不保留它們。") \
  X(kRaceFigure, "{0}: {1}", "{0}：{1}") \
  X(kSpeedPanel, "As fast as standard attention", "相對於標準注意力的速度") \
  X(kMemoryPanel, "Memory beside the inputs, as a share of standard attention's", "輸入以外的記憶體，占標準注意力的比例") \
  X(kSpeedAxis, "times as fast", "倍數") \
  X(kMemoryAxis, "share of memory", "記憶體比例") \
  X(kRaceDescription, "Speed and memory of each contestant beside {0} on {1}, {2}.", "在 {1} 上，各實作相對於{0}的速度與記憶體，問題為 {2}。") \
  X(kOverlapNote, "?: the 95 % intervals of the two medians overlap.", "?：兩者中位數的 95 % 區間重疊。") \
  /* By sequence length. */ \
  X(kBySeqlen, "By sequence length and other sizes", "隨序列長度與其他大小的變化") \
  X(kSeqlenFigure, "By {0}, {1}: {2}", "隨{0}的變化、{1}：{2}") \
  X(kPartBatch, "batch {0}", "batch {0}") \
  X(kPartTokens, "{0} tokens in all", "共 {0} 個 token") \
  X(kPartSeqlen, "seqlen {0}", "序列長度 {0}") \
  X(kPartHeads, "{0} heads", "{0} 個 head") \
  X(kPartHeaddim, "headdim {0}", "headdim {0}") \
  X(kPartCausal, "causal", "因果遮罩") \
  X(kTimePanel, "Time, {0}", "時間，{0}") \
  X(kRatePanel, "Rate, {0}", "運算速率，{0}") \
  X(kSpeedupPanel, "Times as fast as {0}, {1}", "為{0}的幾倍快，{1}") \
  X(kMemoryBySeqlen, "Memory beside the inputs, {0}", "輸入以外的記憶體，{0}") \
  X(kSeqlenAxis, "sequence length", "序列長度") \
  X(kSeqlenKAxis, "number of keys", "key 的數量") \
  X(kBatchAxis, "batch size", "批次大小") \
  X(kHeadsAxis, "number of heads", "head 數") \
  X(kHeaddimAxis, "headdim", "headdim") \
  X(kEmbedAxis, "embedding dimension", "嵌入維度") \
  X(kThreadsAxis, "threads", "執行緒數") \
  X(kTimeAxis, "time", "時間") \
  X(kBytesAxis, "memory", "記憶體") \
  X(kRateAxis, "FLOP/s of visible pairs", "可見配對的 FLOP/s") \
  X(kPeakReference, "measured peak", "實測峰值") \
  X(kSlopeTwo, "slope 2", "斜率 2") \
  X(kBandNote, "Bands: 95 % intervals of the medians, where they are wider than a line.", "色帶為中位數的 95 % 區間（寬於線條時可見）。") \
  X(kSeqlenDescription, "Time, rate and memory by sequence length on {0}, {1}.", "在 {0} 上，{1} 的時間、速率與記憶體隨序列長度的變化。") \
  X(kExponent, "{0}, {1}, {2}: between {3} and {4} the time of {5} grows as seqlen to the power of **{6}** (95 % interval {7} to {8}, {9} lengths).", \
    "{0}、{1}、{2}：序列長度從 {3} 到 {4} 時，{5} 的時間以序列長度的 **{6}** 次方成長（95 % 區間 {7} 至 {8}，共 {9} 個長度）。") \
  X(kMemoryGrowth, "{0}, {1}: at {2}, {3} needs {4} beside the inputs, fattn {5}.", "{0}、{1}：序列長度 {2} 時，{3}在輸入以外需要 {4}，fattn 只需 {5}。") \
  X(kSeqlenTable, "The numbers: {0}, {1}", "數字：{0}、{1}") \
  X(kMoreFamilies, "{0} more series are in the records, and not drawn.", "紀錄中另有 {0} 組序列沒有繪出。") \
  X(kResident, "Memory that a provider measured as its resident set is left out: it counts what the system happened to map.", \
    "對照實作若以常駐記憶體（resident set）量測，則不列入：它包含系統恰好對映的頁面。") \
  /* Everybody. */ \
  X(kVersus, "Beside every other implementation", "與其他所有實作比較") \
  X(kVersusTable, "How many times as fast fattn is, and its memory as a share of the other's", "fattn 的速度倍數，以及記憶體占對方的比例") \
  X(kVersusNote, \
    "Mean: geometric, with what the 95 % intervals of all medians leave if they all err to one side. Decided: faster, slower, undecided (the intervals overlap).", \
    "平均為幾何平均；括號為所有中位數的 95 % 區間都偏向同一側時的範圍。判定依序為：較快、較慢、無法判定（區間重疊）。") \
  X(kVersusFigure, "{0}, {1}: how many times as fast", "{0}、{1}：速度倍數") \
  X(kLeast, "least", "最低") \
  X(kMean, "mean", "平均") \
  X(kMost, "most", "最高") \
  X(kHeadDevice, "device", "裝置") \
  X(kHeadDtype, "dtype", "資料型別") \
  X(kHeadPass, "pass", "計算") \
  X(kHeadOther, "beside", "對象") \
  X(kHeadProblems, "problems", "問題數") \
  X(kHeadDecided, "decided", "判定") \
  X(kHeadMemory, "memory", "記憶體") \
  X(kHeadContestant, "contestant", "實作") \
  X(kHeadTime, "time", "時間") \
  X(kHeadInterval, "95 % interval", "95 % 區間") \
  X(kHeadRate, "rate", "速率") \
  X(kHeadPeak, "of peak", "占峰值") \
  X(kHeadTimes, "times as fast", "速度倍數") \
  X(kHeadExtra, "memory beside inputs", "輸入以外的記憶體") \
  X(kHeadProblem, "problem", "問題") \
  /* Prices. */ \
  X(kPrices, "What options cost", "各選項的代價") \
  X(kPricesText, "More time for a visible (query, key) pair with the option than without it: the median over turns, with the least and the most of a turn.", \
    "使用該選項時，每個可見 (query, key) 配對多花的時間：各輪的中位數，括號為單輪的最小與最大值。") \
  X(kPricesTable, "{0}, {1}", "{0}、{1}") \
  X(kPriceFree, "On {0} in {1}, {2} of {3} prices cannot be told from nothing: the turns lie on both sides of 0.", \
    "在 {0} 上以 {1} 計算，{3} 項代價中有 {2} 項與零無法區分：各輪結果分布在 0 的兩側。") \
  X(kPriceDearest, "On {0} in {1}, the dearest option is `{2}`: {3} ({4} to {5}), {6}, at {7}.", \
    "在 {0} 上以 {1} 計算，代價最高的選項是 `{2}`：{3}（{4} 至 {5}），{6}，問題為 {7}。") \
  X(kHeadOption, "option", "選項") \
  X(kHeadRange, "range", "範圍") \
  /* Models and ceilings. */ \
  X(kMemoryModel, "What moves, by the model", "依模型計算的資料搬移") \
  X(kMemoryModelText, \
    "Counted from each algorithm's loops, not measured: bytes between a chip's own memory and the cache behind it, and what of these comes from the device's memory.", \
    "由各演算法的迴圈計算，並非實測：晶片內記憶體與其後快取之間的位元組，以及其中來自裝置記憶體的部分。") \
  X(kMemoryModelTable, "{0}, {1}", "{0}，{1}") \
  X(kMovesLess, "On {0}, {1}, {2}: standard attention moves **{3}** between the chip's own memory and the cache by this count; {4}.", \
    "在 {0} 上，{1}，{2}：依此計算，標準注意力在晶片內記憶體與快取之間搬移 **{3}**；{4}。") \
  X(kHeadMoved, "moved", "搬移量") \
  X(kHeadDram, "from the device's memory", "來自裝置記憶體") \
  X(kHeadIntensity, "FLOP a byte", "每位元組 FLOP") \
  X(kHeadBinds, "what binds", "瓶頸") \
  X(kHeadBound, "no faster than", "時間下限") \
  X(kHeadAlgorithm, "algorithm", "演算法") \
  X(kPredictions, "How well times are predicted", "時間預測的準確度") \
  X(kPredictionsText, \
    "On {0}, {1}: the mean absolute error of {2} predicted times is **{3}**; 95 % of them err by at most {4}, the worst by {5} ({6}).", \
    "在 {0} 上，{1}：{2} 個預測時間的平均絕對誤差為 **{3}**；其中 95 % 的誤差不超過 {4}，最差為 {5}（{6}）。") \
  X(kPredictionsMemory, "Memory is right to the byte in {0} of {1}.", "{1} 個記憶體預測中有 {0} 個完全正確。") \
  X(kNotPredicted, "Not predicted, {0} rows: {1}", "{0} 列沒有預測：{1}") \
  X(kPredictionsOne, "Predicted before it ran", "執行前的預測") \
  X(kHeadPredicted, "predicted", "預測") \
  X(kHeadMeasured, "measured", "實測") \
  X(kScatterPanel, "Predicted against measured", "預測與實測") \
  X(kScatterCaption, "{0}: each point is a problem; on the line the prediction is right", "{0}：每一點為一個問題；落在線上表示預測正確") \
  X(kPredictedAxis, "predicted time", "預測時間") \
  X(kMeasuredAxis, "measured time", "實測時間") \
  X(kExactLine, "exact", "完全正確") \
  X(kCeilings, "Ceilings of the machine", "機器的上限") \
  X(kCeilingsText, "Measured by `fattn calibrate`, each with the interval of its median.", "由 `fattn calibrate` 量測，並附中位數的區間。") \
  X(kHeadQuantity, "quantity", "項目") \
  X(kHeadValue, "value", "數值") \
  /* When to use which algorithm. */ \
  X(kWhen, "When to use which", "何時該用哪一種") \
  X(kWhenText, \
    "Searched by `fattn advise --when`: at each length both are measured in turns, and lengths are halved between one where the second is faster and one where it is not. " \
    "Faster means that the 95 % intervals of the medians lie apart.", \
    "由 `fattn advise --when` 搜尋：每個長度都輪流量測兩者，再於「後者較快」與「尚未較快」的長度之間逐次折半。較快是指兩個中位數的 95 % 區間不重疊。") \
  X(kWhenDecode, "decode, one query", "解碼（單一 query）") \
  X(kWhenTokens, "tokens", "個 token") \
  X(kWhenKeys, "keys", "個 key") \
  X(kWhenFrom, "On {0}, {1}: **{2}** is faster than {3} from {4} {7} on, {8} times at {6}, the longest; at {5} it is not yet.", \
    "在 {0} 上，{1}：從 {4} {7} 開始，**{2}** 比{3}快，在最長的 {6} 時為 {8} 倍；{5} 時尚未較快。") \
  X(kWhenAlways, "On {0}, {1}: **{2}** is faster than {3} at every length that was measured, {4} to {5} {6}, {7} times at the longest.", \
    "在 {0} 上，{1}：在量測的每個長度（{4} 至 {5} {6}）**{2}** 都比{3}快，最長時為 {7} 倍。") \
  X(kWhenNever, "On {0}, {1}: up to {4} {5} {2} is not measurably faster than {3}: {6} times at the longest.", \
    "在 {0} 上，{1}：直到 {4} {5}，{2} 都沒有可量測地比{3}快：最長時為 {6} 倍。") \
  X(kWhenNeverSlower, "On {0}, {1}: up to {4} {5} {2} is not measurably faster than {3}, and slower at some lengths: {6} times at the longest.", \
    "在 {0} 上，{1}：直到 {4} {5}，{2} 都沒有可量測地比{3}快，且在某些長度較慢：最長時為 {6} 倍。") \
  X(kWhenNone, "On {0}, {1}: {2} and {3} were not timed at the same length, so nothing is said about who is faster.", \
    "在 {0} 上，{1}：{2} 與{3}沒有在同一長度計時，因此不對快慢下結論。") \
  X(kWhenStopped, "On {0}, {1}: the search between {2} and {3} was interrupted, so nothing is said about who is faster.", \
    "在 {0} 上，{1}：{2} 與{3}之間的搜尋在中途被中斷，因此不對快慢下結論。") \
  X(kWhenFigure, "{0}: time by length", "{0}：時間隨長度的變化") \
  X(kHeadLength, "length", "長度") \
  /* Accuracy and values. */ \
  X(kAccuracy, "Accuracy", "精確度") \
  X(kAccuracyText, \
    "{0} errors on {1}, each a ratio to a peer's on the same inputs. {2} goals are met, {3} missed; the other ratios have none.", \
    "{1} 上的 {0} 個誤差，皆為與對照實作在相同輸入下的比值。{2} 項達到目標，{3} 項未達；其餘比值未設目標。") \
  X(kAccuracyTable, "RMS error over the peer's, the geometric mean and the largest", "RMS 誤差與對照的比值：幾何平均與最大值") \
  X(kHeadPeer, "peer", "對照") \
  X(kHeadTensor, "tensor", "張量") \
  X(kHeadRatios, "ratios", "比值數") \
  X(kHeadLargest, "largest", "最大") \
  X(kValuesText, "{0} times on {1} with NaN, infinities and other hard values, over that of the same call on random numbers: {2} at the median, {3} at most ({4}).", \
    "在 {1} 上以 NaN、無限大等棘手數值量測 {0} 個時間，與相同呼叫使用亂數時的比值：中位數 {2}，最大 {3}（{4}）。") \
  /* Comparisons of records. */ \
  X(kRegress, "Beside an earlier record", "與先前紀錄比較") \
  X(kRegressText, "{0} against {1}, margin {2}: **{3} worse**, {4} better, {5} the same, {6} undecided; {7} failed, {8} vanished, {9} appeared.", \
    "{0} 對 {1}，界限 {2}：**{3} 項變差**、{4} 項變好、{5} 項不變、{6} 項無法判定；{7} 項失敗、{8} 項消失、{9} 項新增。") \
  X(kRegressTable, "Rows that are worse, better or failed", "變差、變好或失敗的項目") \
  X(kHeadVerdict, "verdict", "判定") \
  X(kHeadChange, "time now over then", "現在與當時的時間比") \
  X(kHeadReason, "reason", "原因") \
  /* How it was measured. */ \
  X(kEnvironment, "Where and how it was measured", "量測環境與方法") \
  X(kEnvironmentTable, "Records", "紀錄") \
  X(kHeadRecord, "record", "紀錄") \
  X(kHeadDate, "date (UTC)", "日期（UTC）") \
  X(kHeadMachine, "machine", "機器") \
  X(kHeadVersion, "version", "版本") \
  X(kHeadRows, "rows", "列數") \
  X(kHeadSystem, "system", "系統") \
  X(kHeadPeaks, "measured peaks", "實測峰值") \
  X(kMethod, \
    "Contestants compute the same inputs in turns, five rounds, so that a drift of the machine hits all of them. An interval covers the median with at least 95 % from six " \
    "samples on, whatever the distribution. Peaks are measured in the same run; memory is the peak that a call adds over its inputs.", \
    "各實作以相同輸入輪流計算五輪，讓機器的漂移平均影響每一方。自六個樣本起，區間至少以 95 % 的機率涵蓋中位數，不假設任何分布。峰值在同一次執行中量測；記憶體是呼叫在輸入以外增加的最高用量。") \
  X(kPeakPair, "{0}: {1} before, {2} after", "{0}：之前 {1}、之後 {2}") \
  X(kReadRate, "memory read: {0}", "記憶體讀取：{0}") \
  /* What was not measured. */ \
  X(kMissing, "What was not measured, and why", "沒有量測的項目與原因") \
  X(kMissingNone, "Every row of these records was measured.", "這些紀錄中的每一列都有量測結果。") \
  X(kMissingTable, "Rows without a time", "沒有時間的列") \
  X(kHeadStatus, "status", "狀態") \
  X(kHeadExample, "for example", "例如") \
  X(kIncomplete, "`{0}` was interrupted: it holds what was measured until then.", "`{0}` 在中途被中斷：只含當時已量測的部分。") \
  X(kDisturbed, "`{0}`: {1}", "`{0}`：{1}") \
  X(kWarned, "`{0}`, {1} rows, for example: {2}", "`{0}`，{1} 列，例如：{2}") \
  X(kAbsentKinds, "No record of {0} was given; nothing is said about that.", "沒有提供 {0} 的紀錄，因此不予說明。") \
  X(kNotRead, "Files of the folder that are no records of a kind that reports know were not read: {0}.", "資料夾中不屬於報告所認得之紀錄種類、因此沒有讀取的檔案：{0}。") \
  X(kOneDevice, "All numbers are of {0}; nothing is said of other machines.", "所有數字都來自 {0}；不代表其他機器。")
// clang-format on
