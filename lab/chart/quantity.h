// What numbers on axes and beside marks are, and how they are written: "1 ms", "64 KiB", "512", "2.5x".
#pragma once

#include <string>

namespace fattn::lab::chart {

enum class Unit {
  kPlain,  // as it is: 512, 0.25
  kTime,   // seconds: "500 us", "1 ms"
  kBytes,  // "64 KiB"
  kRate,   // of something a second, whose name the axis's title gives: "250 G"
  kTimes,  // "4x"
  kShare,  // of 1: "14 %"
};

// Of at most `digits` digits, so that neighbouring ticks differ and no more is said than a mark shows. "-" for what is no number.
std::string text_of(Unit unit, double value, int digits = 3);

}  // namespace fattn::lab::chart
