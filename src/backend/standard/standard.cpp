#include "backend/standard/standard.h"
namespace fattn::core {
std::string standard_unsupported(const Problem&) { return "algorithm standard is being built"; }
size_t standard_workspace_bytes(const Problem&, int) { return 0; }
void execute_standard(const Plan&, const fattn_buffers&) {}
}  // namespace fattn::core
