// How long work of many steps still takes, so that who watches can rely on it: it follows what was measured slowly and never jumps up.
#pragma once

#include <optional>
#include <string>

namespace fattn::measure {

// Steps have weights: the seconds that they are expected to take, or, where nobody knows, any numbers in that proportion. All times are seconds since
// the work began.
class RemainingTime {
 public:
  // `in_seconds`: the weights are seconds, so that there is a first answer before anything is done.
  void expect(double weight, bool in_seconds);
  void done(double weight, double now);
  void drop(double weight);  // will not be done after all

  double share() const;  // of the weight that is done, 0 to 1
  // Nothing in the first second of work of which nobody knows how long its steps take.
  std::optional<double> left(double now);

 private:
  double pace(double now) const;  // seconds of one unit of weight

  double total_ = 0, done_ = 0;
  bool in_seconds_ = false;
  std::optional<double> end_;     // when it will all be done
  std::optional<double> shown_;   // the last answer
  double asked_ = 0, moved_ = 0;  // when that was; when `end_` was last renewed
};

// For people, who want no more than is known: "40 seconds", "12 minutes", "3 hours", "33 days".
std::string duration_in_words(double seconds);

}  // namespace fattn::measure
