// The same work on several threads, to its end.
#pragma once

#include <functional>

namespace fattn::gpt2 {

// Calls `work` on up to `threads` threads, fewer where the system gives no more, and waits for all of them; throws what the first of them threw.
// This thread only waits, so that it hears signals.
void run_on_threads(int threads, const std::function<void()>& work);

}  // namespace fattn::gpt2
