// What a machine was measured to do at most: a record that is made once by `fattn calibrate`, kept beside the kernel cache, and served to the same
// machine only. docs/RECORD.md has the format.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fattn/types.hpp"
#include "lab/kernel_times.h"

namespace fattn::lab {

// A record that is broken, of another version, or of another machine; the message says which file, what is wrong and what to do.
class CalibrationError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Whom a calibration serves: what of the machine changes its rates. Names and values, in a fixed order.
using MachineIdentity = std::vector<std::pair<std::string, std::string>>;
// `device`: "cpu" or "cuda:0". Throws fattn::Error where there is no such device.
MachineIdentity identity_of(const std::string& device);

// A rate or a time: the median of several samples, and the range of all.
struct Measured {
  double value = 0;  // 0: not measured, and `reason` says why
  double low = 0, high = 0;
  int samples = 0;
  std::string reason;

  bool known() const { return value > 0; }
  double spread() const { return known() ? (high - low) / value : 0; }
};

// What is measured, in the order in which it is shown.
struct Quantity {
  const char* name;  // its unit is in it: flops_per_s, bytes_per_s, per_s, s
  const char* words;
};
const std::vector<Quantity>& quantities(bool cuda);

struct Calibration {
  std::string device = "cpu";  // or "cuda"; which one, its identity says
  MachineIdentity machine;
  std::map<std::string, double> facts;       // what is known without measuring: sizes in bytes, numbers of cores, threads, multiprocessors
  std::map<std::string, Measured> measured;  // by the names of quantities(); all are there
  std::optional<KernelTimes> kernels;        // what the library's kernels take; absent: not measured
  nlohmann::ordered_json environment;        // as every record has it
  double seconds = 0;                        // that measuring took

  bool on_cuda() const { return device == "cuda"; }
  // 0 where it is not known. Throws std::out_of_range for a name that is none.
  double of(const std::string& name) const;
  double fact(const std::string& name) const;
};

nlohmann::ordered_json to_json(const Calibration& calibration);
// Throws CalibrationError; `source` names the file in messages.
Calibration calibration_from_json(const std::string& text, const std::string& source);

// Where the calibration of a device is kept; throws CalibrationError where there is no folder for it.
std::string calibration_path(const std::string& device);
// The file's, whoever's machine it is. Throws CalibrationError, also where there is no file.
Calibration read_calibration(const std::string& path);
// In plain words what of this machine is not the calibration's ("its processor was ..., here is ..."); empty: it serves.
std::string why_not_served(const Calibration& calibration, const std::string& device);
// That of this machine and device, from where it is kept. Throws CalibrationError, and the message says to run `fattn calibrate`.
Calibration stored_calibration(const std::string& device);

}  // namespace fattn::lab
