// Constants of a model from measurements: the least relative error, every constant above 0.
#pragma once

#include <functional>
#include <vector>

namespace fattn::lab {

// The model: seconds of sample `i` with these constants.
using Model = std::function<double(size_t i, const std::vector<double>& constants)>;

// Minimises the sum of squares of log(model / seconds), the larger errors damped, by Levenberg and Marquardt's method on the constants' logarithms.
// `start`: above 0; a constant that the samples say nothing of stays near it. `held`: how much each is held there: to be e times as large costs
// `held`, and a sample that is 10 % off 0.01.
std::vector<double> fit(const Model& model, const std::vector<double>& seconds, std::vector<double> start, const std::vector<double>& held);

}  // namespace fattn::lab
