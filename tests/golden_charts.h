// Figures of made-up numbers that show every kind of panel.
#pragma once

#include <cmath>
#include <map>
#include <string>

#include "lab/chart/chart.h"

namespace fattn::lab::chart {

inline std::vector<Point> power(double factor, double exponent, double from, double to, double spread) {
  std::vector<Point> points;
  for (double x = from; x <= to; x *= 2) {
    const double y = factor * std::pow(x, exponent);
    points.push_back({x, y, y * (1 - spread), y * (1 + spread)});
  }
  return points;
}

inline Figure seqlen_chart() {
  Panel time;
  time.title = "Forward: time";
  time.x = {"seqlen", ScaleKind::kLog2};
  time.y = {"median and its 95 % interval", ScaleKind::kLog10, Unit::kTime};
  time.lines = {{"standard", 0, power(2e-9, 2.1, 256, 4096, 0.15)}, {"fattn", 1, power(7e-10, 1.95, 256, 16384, 0.1)}};
  time.lines[0].points.push_back({8192, kNotKnown});
  Panel memory = time;
  memory.title = "Forward: peak extra memory";
  memory.y = {"bytes", ScaleKind::kLog2, Unit::kBytes};
  memory.lines = {{"standard", 0, power(48, 2, 256, 4096, 0)}, {"fattn", 1, power(3072, 1, 256, 16384, 0)}};
  Panel bars;
  bars.title = "Forward: speed-up over standard";
  bars.x = {"seqlen", ScaleKind::kBand, Unit::kPlain, {"256", "512", "1024", "2048", "4096", "8192"}};
  bars.y = {"times as fast", ScaleKind::kLinear, Unit::kTimes};
  bars.bars = {{"fattn", 1, {0.92, 1.4, 2.13, 3.52, 5.1, kNotKnown}, {"0.92x", "1.40x", "2.13x", "3.52x", "5.10x", "standard: out of memory"}}};
  bars.references = {{Reference::Kind::kLevel, "as fast as standard", 1}};
  Panel order = time;
  order.title = "Forward: how time grows";
  order.references = {{Reference::Kind::kPower, "seqlen^2", 2e-9, 2}, {Reference::Kind::kPower, "fattn: seqlen^1.95 (1.90 to 2.00)", 7e-10, 1.95, 1}};
  return {"Attention by sequence length: B4 H12 D64 bf16", "Made-up numbers.", {time, memory, bars, order}, 2, "Bands: 95 % intervals of medians."};
}

inline Figure roofline_chart() {
  Panel roof;
  roof.title = "Roofline";
  roof.x = {"FLOP per byte", ScaleKind::kLog10};
  roof.y = {"FLOP/s", ScaleKind::kLog10, Unit::kRate};
  roof.lines = {{"DRAM", 7, {{1, 2e12}, {300, 6e14}, {4000, 6e14}}, true, false},
                {"standard", 0, {{60, 4e13}}},
                {"v2", 2, {{900, 3.5e14}}},
                {"v3", 3, {{1000, 5.2e14}}}};
  Panel scatter;
  scatter.title = "Predicted against measured";
  scatter.x = {"measured", ScaleKind::kLog10, Unit::kTime};
  scatter.y = {"predicted", ScaleKind::kLog10, Unit::kTime};
  Line points{"held-out shapes", 4, {}, false};
  for (int i = 0; i < 40; ++i) {
    const double t = 1e-5 * std::pow(1.3, i);
    points.points.push_back({t, t * (1 + 0.2 * std::sin(i * 7.0))});
  }
  scatter.lines = {points};
  scatter.references = {{Reference::Kind::kPower, "predicted = measured", 1, 1}};
  Panel none;
  none.title = "Backward";
  none.nothing = "the backward pass was not measured: --no-grad";
  return {"Models", "", {roof, scatter, none}, 3};
}

inline Figure bars_chart() {
  Panel bars;
  bars.title = "記憶體:與標準注意力之比";
  bars.x = {"序列長度", ScaleKind::kBand, Unit::kPlain, {"512", "1024", "2048", "4096"}};
  bars.y = {"占標準的比例", ScaleKind::kLinear, Unit::kShare};
  bars.bars = {{"v1", 2, {0.61, 0.4, 0.22, 0.12}},
               {"v2", 3, {0.5, 0.31, 0.17, 0.09}},
               {"v3", 4, {0.5, 0.31, 0.17, kNotKnown}, {"50 %", "31 %", "17 %", "不支援"}}};
  return {
      "序列長度的影響:batch 4、12 heads、headdim 64,在一張 <GPU> 上,以 bf16 計算並與 float64 對照", "虛構的數字。", {bars}, 1, "", "golden", "zh-TW"};
}

inline std::map<std::string, Figure> golden_charts() {
  return {{"chart_seqlen", seqlen_chart()}, {"chart_models", roofline_chart()}, {"chart_bars", bars_chart()}};
}

}  // namespace fattn::lab::chart
