#include "backend/cpu/cpu.h"
namespace fattn::core {
void execute_cpu(const Plan&, const fattn_buffers&) {}
}  // namespace fattn::core
