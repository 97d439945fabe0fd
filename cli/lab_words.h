// What `fattn lab` says: X(name, English, Traditional Chinese as Taiwan writes it). {0}, {1}, ... are filled in by fmt.
#pragma once

// clang-format off
#define FATTN_LAB_TEXTS(X) \
  /* The frame. */ \
  X(kHead, "FlashAttention in five steps, computed on {0}. Each asks a question.", "五個步驟認識 FlashAttention，全部在 {0} 上實際計算。每一步都會問一個問題。") \
  X(kStepTitle, "Step {0} of {1}: {2}", "第 {0} 步，共 {1} 步：{2}") \
  X(kQuestion, "Question: ", "問題： ") \
  X(kAnswer, "Answer: ", "答案： ") \
  X(kEnterAnswer, "(Enter shows the answer) ", "（按 Enter 看答案） ") \
  X(kEnterNext, "(Enter goes on) ", "（按 Enter 繼續） ") \
  X(kEnd, "Further: the course in docs/lab (make notebooks), `fattn memory --explain`, `fattn sweep`, `fattn advise --when`.", \
    "接下來：docs/lab 的課程（make notebooks）、`fattn memory --explain`、`fattn sweep`、`fattn advise --when`。") \
  X(kNotTimed, "{0} at seqlen {1} has no time: {2}", "{0} 在 seqlen {1} 沒有時間：{2}") \
  X(kSameResult, "The results differ by {0} at most, of {1} allowed: rounding alone.", "結果最多相差 {0}，容許 {1}：只是捨入誤差。") \
  X(kSeqlen, "seqlen", "seqlen") \
  X(kTimeOf, "time of {0}", "{0} 的時間") \
  X(kMemoryOf, "memory of {0}", "{0} 的記憶體") \
  X(kBytes, "memory", "記憶體") \
  /* 1: the whole matrix. */ \
  X(kMatrixTitle, "the whole matrix", "整個矩陣") \
  X(kMatrixText, \
    "Standard attention makes S = q k^T, P = softmax(S), o = P v. S and P have seqlen x seqlen numbers for every head. Here are {0} heads of headdim {1} in {2}: standard " \
    "attention, and FlashAttention (v2), which computes the same without storing either.", \
    "標準注意力依序計算 S = q k^T、P = softmax(S)、o = P v。每個 head 的 S 與 P 都有 seqlen x seqlen 個數字。以下是 {0} 個 headdim {1} 的 head（{2}）：標準注意力，以及結果相同、卻不儲存這兩個矩陣的 " \
    "FlashAttention（v2）。") \
  X(kMatrixColumn, "one matrix", "一個矩陣") \
  X(kMatrixPlot, "memory beside the inputs", "輸入以外的記憶體") \
  X(kMatrixQuestion, "Twice the length: how many times as large is the matrix, and how many times as long takes standard attention?", \
    "長度加倍時，矩陣變成幾倍大？標準注意力的時間變成幾倍？") \
  X(kMatrixAnswer, \
    "4 times, and about 4 times: here {0} times from seqlen {1} to {2}. FlashAttention's time grows alike ({3} times), for it does the same arithmetic; its memory only doubles " \
    "({4} times).", \
    "矩陣 4 倍，時間也約 4 倍：這裡從 seqlen {1} 到 {2} 是 {0} 倍。FlashAttention 的時間成長相同（{3} 倍），因為運算量一樣；記憶體則只加倍（{4} 倍）。") \
  X(kMatrixAnswerAlone, "4 times, and about 4 times. FlashAttention's memory only doubles ({0} times from seqlen {1} to {2}).", \
    "矩陣 4 倍，時間也約 4 倍。FlashAttention 的記憶體只加倍（從 seqlen {1} 到 {2} 是 {0} 倍）。") \
  /* 2: tiles. */ \
  X(kTilesTitle, "tiles", "分塊") \
  X(kTilesText, \
    "The matrix is made tile by tile, each used up at once. v1 (2022) has blocks of keys outside: o goes to memory and back for every block of keys. v2 (2023) has blocks of " \
    "queries outside: a row of tiles keeps its o until it is done and needs no other row, so that rows are computed in parallel. The order of the tiles:", \
    "矩陣一塊一塊地算，算完立刻用掉。v1（2022）的外層迴圈是 key 的區塊：每處理一塊 key，o 就要寫出再讀回一次。v2（2023）的外層迴圈是 query 的區塊：每一列的 o 留在晶片上直到算完，各列互不相干，可以平行計算。計算順序：") \
  X(kTilesTraffic, \
    "What goes between chip and memory in the forward pass, counted as the papers do, for a chip memory of {0} ({1}). v1 and v2 also grow with the square of the length: they move " \
    "Theta(N^2 d^2 / M) numbers, M being what the chip holds. That is not O(N).", \
    "前向計算時晶片與記憶體之間的搬運量，依論文的算法計數，晶片記憶體為 {0}（{1}）。v1 與 v2 同樣隨長度的平方成長：搬運量是 Theta(N^2 d^2 / M)，M 為晶片上容得下的數字個數。並不是 O(N)。") \
  X(kTilesOnce, "inputs, outputs", "輸入與輸出") \
  X(kTilesPlot, "moved between chip and memory", "晶片與記憶體之間的搬運量") \
  X(kTilesQuestion, "The sequence doubles. What v2 moves becomes how many times as much, and what would make it less?", "序列長度加倍，v2 的搬運量變成幾倍？什麼能讓它變少？") \
  X(kTilesAnswer, \
    "{0} times, as for standard attention; FlashAttention gains a factor, not a power of N. Less is moved where the chip holds more (larger M) or heads are narrower (smaller d). Here v2 " \
    "moves {1} of what standard attention does.", \
    "{0} 倍，和標準注意力一樣；FlashAttention 省下的是一個倍數，不是 N 的次方。晶片容量 M 較大、或 headdim d 較小時搬得較少。這裡 v2 的搬運量是標準注意力的 {1}。") \
  /* 3: online softmax. */ \
  X(kSoftmaxTitle, "online softmax on eight numbers", "八個數字的線上 softmax") \
  X(kSoftmaxText, \
    "Softmax needs the largest score and the sum over the whole row, and a tile has a part of the row. So three numbers are kept: m, the largest so far; l, the sum of exp(s - m); a, the same " \
    "with the values 0, 1, 2, ... 7 as weights. A new m makes what was summed wrong by one factor, exp(old m - new m), by which it is multiplied. Two scores at a time:", \
    "Softmax 需要整列的最大值與總和，但一塊只看得到一部分。所以只保留三個數：目前的最大值 m、exp(s - m) 的總和 l，以及乘上數值 0、1、2、…、7 的總和 a。m 更新後，先前的總和只差一個倍數 exp(舊 m - 新 m)，乘上去即可。每次取兩個分數：") \
  X(kSoftmaxScores, "scores", "分數") \
  X(kSoftmaxFactor, "old sums times", "舊總和乘以") \
  X(kSoftmaxExact, "softmax so far", "至今的 softmax") \
  X(kSoftmaxPlot, "a / l by keys seen", "a / l 隨看過的 key 數") \
  X(kSoftmaxKeys, "keys seen", "看過的 key 數") \
  X(kSoftmaxQuestion, "In the third line the largest score rises from {0} to {1}. What happened to the sums of the first four keys?", "第三行的最大值由 {0} 升到 {1}。前四個 key 的總和怎麼了？") \
  X(kSoftmaxAnswer, "They were multiplied by exp({0} - {1}) = {2}. In every line a / l is what softmax over the keys so far gives (difference at most {3}): nothing is approximated.", \
    "乘上了 exp({0} - {1}) = {2}。每一行的 a / l 都等於對至今所有 key 做 softmax 的結果（差距最多 {3}）：沒有任何近似。") \
  /* 4: the backward pass. */ \
  X(kBackwardTitle, "the backward pass computes again", "反向計算重新算一次") \
  X(kBackwardText, \
    "Gradients need the weights P again. Standard attention has stored them. FlashAttention has kept lse, one number a row, and makes every tile again: P = exp(S - lse). That is a fifth product " \
    "beside the four of the gradients. Its backward pass, {0}:", \
    "梯度會再用到權重 P。標準注意力把它存了下來；FlashAttention 每列只留一個數 lse，反向時重新算出每一塊：P = exp(S - lse)。除了梯度的四個矩陣乘法，多了第五個。{0} 的反向計算：") \
  X(kBackwardPlot, "memory of the backward pass beside the inputs", "反向計算在輸入以外的記憶體") \
  X(kBackwardQuestion, "FlashAttention computes five products where four would do. What does it save for that?", "FlashAttention 做五次矩陣乘法，本來四次就夠。它換到了什麼？") \
  X(kBackwardAnswer, \
    "The matrix, in memory and on the way to it: {0} instead of {1} at seqlen {2}, and {3} instead of {4}. Arithmetic is cheap beside the reading of N^2 weights.", \
    "省下整個矩陣的儲存與搬運：在 seqlen {2} 記憶體是 {0} 而非 {1}，時間是 {3} 而非 {4}。比起讀取 N^2 個權重，運算很便宜。") \
  X(kBackwardAnswerAlone, "The matrix: {0} are enough at seqlen {1}. Arithmetic is cheap beside the reading of N^2 weights.", "省下整個矩陣：在 seqlen {1} 只要 {0}。比起讀取 N^2 個權重，運算很便宜。") \
  /* 5: masks. */ \
  X(kMasksTitle, "blocks that a mask hides are skipped", "跳過遮罩蓋住的區塊") \
  X(kMasksText, \
    "A causal query sees the keys up to its own; with a window, only so many before it. Tiles that nobody sees are not computed, those that the edge cuts are computed whole. # computed, / cut, . skipped:", \
    "因果遮罩下，query 只看得到自己以前的 key；加上視窗，則只看得到最近的若干個。沒有人看的區塊不計算，被邊界切過的整塊計算。# 計算、/ 被切過、. 跳過：") \
  X(kMasksNone, "no mask", "無遮罩") \
  X(kMasksCausal, "causal", "因果") \
  X(kMasksWindow, "causal, window {0}", "因果，視窗 {0}") \
  X(kMasksMask, "mask", "遮罩") \
  X(kMasksShare, "tiles of 64", "計算的 64 塊") \
  X(kMasksTime, "time", "時間") \
  X(kMasksSpeed, "as fast", "速度") \
  X(kMasksPlot, "speed beside no mask", "相對於無遮罩的速度") \
  X(kMasksTimes, "times", "倍數") \
  X(kMasksQuestion, "How many times as fast can a causal mask make a long sequence at most, and why is it less in short ones?", "因果遮罩最多能讓長序列快幾倍？為何短序列少一些？") \
  X(kMasksAnswer, \
    "2 times: half of the tiles are above the diagonal. Tiles on it are computed whole, and with n rows of tiles they are 2 / (n + 1) of those computed: {0} of all tiles at seqlen {1}, {2} at {3}. Measured " \
    "here: {4} and {5} times.", \
    "2 倍：對角線以上有一半的區塊。對角線上的整塊計算；n 列時它們佔計算量的 2 / (n + 1)：seqlen {1} 時要算全部的 {0}，seqlen {3} 時 {2}。這裡量到 {4} 倍與 {5} 倍。")
// clang-format on

namespace fattn::cli {

enum class LabText {
#define FATTN_TEXT(name, english, chinese) name,
  FATTN_LAB_TEXTS(FATTN_TEXT)
#undef FATTN_TEXT
      kCount
};

}  // namespace fattn::cli
