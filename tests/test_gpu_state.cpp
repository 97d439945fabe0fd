// What `fattn watch` reads: GPUs on a stub of NVML, processes and the machine as /proc has them. Needs no GPU.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <ctime>
#include <string>
#include <vector>

#include "measure/gpu_state.h"
#include "measure/process_state.h"
#include "stub/nvml_stub.h"

namespace fattn::measure {
namespace {

// The stub's numbers, as at first.
test::NvmlStubState& stub() {
  static void* const library = dlopen(FATTN_STUB_NVML_PATH, RTLD_NOW | RTLD_LOCAL);
  auto* state = reinterpret_cast<test::NvmlStubState* (*)()>(dlsym(library, "stub_state"))();
  *state = {};
  return *state;
}

const Nvml& stubbed() {
  static const Nvml library = open_nvml({FATTN_STUB_NVML_PATH});
  return library;
}

constexpr uint64_t kMiB = 1 << 20;

TEST(GpuState, HasWhatTheDriverSays) {
  stub().reasons = 0x1 | kPowerCap;
  const GpuMonitor monitor(stubbed());
  EXPECT_EQ(monitor.problem(), "");
  const std::vector<GpuState> all = monitor.read();
  ASSERT_EQ(all.size(), 1u);
  const GpuState& gpu = all[0];
  EXPECT_EQ(gpu.index, 0u);
  EXPECT_EQ(gpu.name, "Stub GPU");
  EXPECT_EQ(gpu.busy, 0.97);
  EXPECT_EQ(gpu.memory_busy, 0.40);
  EXPECT_EQ(gpu.memory_used_bytes, 20480 * kMiB);
  EXPECT_EQ(gpu.memory_bytes, 143771 * kMiB);
  EXPECT_EQ(gpu.sm_clock_mhz, 1500);
  EXPECT_EQ(gpu.highest_sm_clock_mhz, 1980);
  EXPECT_EQ(gpu.memory_clock_mhz, 3201);
  EXPECT_EQ(gpu.power_w, 600);
  EXPECT_EQ(gpu.power_limit_w, 700);
  EXPECT_EQ(gpu.temperature_c, 61);
  EXPECT_EQ(gpu.held_back, kPowerCap);
  EXPECT_EQ(gpu.processes, (std::vector<GpuProcess>{{4294967294, 20480 * kMiB}}));
}

TEST(GpuState, LeavesOutWhatTheDriverDoesNotSay) {
  test::NvmlStubState& state = stub();
  state.busy = state.memory_busy = state.celsius = state.highest_mhz = state.memory_clock_mhz = state.clock_mhz = -1;
  state.used_mib = state.processes = state.instant_mw = state.average_mw = state.limit_mw = -1;
  const std::vector<GpuState> all = GpuMonitor(stubbed()).read();
  ASSERT_EQ(all.size(), 1u);
  const GpuState& gpu = all[0];
  EXPECT_FALSE(gpu.busy || gpu.memory_busy || gpu.memory_used_bytes || gpu.memory_bytes || gpu.sm_clock_mhz || gpu.highest_sm_clock_mhz);
  EXPECT_FALSE(gpu.memory_clock_mhz || gpu.power_w || gpu.power_limit_w || gpu.temperature_c || gpu.processes);
}

TEST(GpuState, NamesTheProcessesWithTheMostMemoryFirst) {
  test::NvmlStubState& state = stub();
  state.processes = 3;
  state.pid = 30;
  state.used_mib = 6;
  const GpuMonitor monitor(stubbed());
  EXPECT_EQ(monitor.read().at(0).processes, (std::vector<GpuProcess>{{28, 6 * kMiB}, {29, 3 * kMiB}, {30, 2 * kMiB}}));
  state.memory_of_processes = false;
  EXPECT_EQ(monitor.read().at(0).processes, (std::vector<GpuProcess>{{30, {}}, {29, {}}, {28, {}}}));
  state.processes = 100000;  // more than are asked for
  EXPECT_FALSE(monitor.read().at(0).processes);
}

TEST(GpuState, HasEveryDevice) {
  stub().devices = 8;
  const std::vector<GpuState> all = GpuMonitor(stubbed()).read();
  ASSERT_EQ(all.size(), 8u);
  EXPECT_EQ(all[7].index, 7u);
}

TEST(GpuState, SaysWhyThereIsNone) {
  stub().devices = 0;
  EXPECT_EQ(GpuMonitor(stubbed()).problem(), "NVML knows no GPU");
  stub().devices = -1;
  EXPECT_EQ(GpuMonitor(stubbed()).problem(), "NVML does not count its devices: Not Supported");
  Nvml old = stubbed();
  old.deviceGetCount = nullptr;
  EXPECT_EQ(GpuMonitor(old).problem(), "the driver's NVML does not name its devices");
  const GpuMonitor none(open_nvml({"/nowhere/libnvidia-ml.so.1"}));
  EXPECT_NE(none.problem().find("no usable NVML"), std::string::npos);
  EXPECT_TRUE(none.read().empty());
}

TEST(ProcessStateSmall, IsThatOfThisProcess) {
  const std::optional<ProcessState> before = process_state(getpid());
  ASSERT_TRUE(before);
  EXPECT_EQ(before->name, std::string("test_gpu_state").substr(0, 15));
  EXPECT_GE(before->threads, 1);
  EXPECT_GT(before->resident_bytes, kMiB);
  EXPECT_NEAR(before->started, static_cast<double>(std::time(nullptr)), 600);
  EXPECT_LE(before->started, static_cast<double>(std::time(nullptr)) + 2);
  // It computes for longer than a tick of the system's clock.
  volatile double sum = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  while (std::chrono::steady_clock::now() < end) sum = sum + 1;
  const std::optional<ProcessState> after = process_state(getpid());
  ASSERT_TRUE(after);
  EXPECT_GT(after->cpu_seconds, before->cpu_seconds);
  EXPECT_EQ(after->started, before->started);
  EXPECT_NE(command_line_of(getpid()).at(0).find("test_gpu_state"), std::string::npos);
  char folder[4096];
  ASSERT_TRUE(getcwd(folder, sizeof folder));
  EXPECT_EQ(working_folder_of(getpid()), folder);
}

TEST(ProcessStateSmall, IsNothingOfWhatHasEnded) {
  EXPECT_FALSE(process_state(int64_t{1} << 40));
  EXPECT_FALSE(process_state(0));
  EXPECT_TRUE(command_line_of(int64_t{1} << 40).empty());
  EXPECT_EQ(working_folder_of(int64_t{1} << 40), "");
  const pid_t child = fork();
  if (child == 0) _exit(0);
  // It waits for its parent, who has not asked yet.
  siginfo_t ended{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(process_state(child));
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(process_state(child));
}

TEST(ProcessStateSmall, ReadsNamesThatMislead) {
  int ready[2], done[2];
  ASSERT_EQ(pipe(ready) + pipe(done), 0);
  const pid_t child = fork();
  if (child == 0) {
    const int name = open("/proc/self/comm", O_WRONLY);
    char byte = write(name, "a) Z (1 2", 9) == 9 ? 'y' : 'n';
    byte = write(ready[1], &byte, 1) == 1 ? 'y' : 'n';
    _exit(read(done[0], &byte, 1) == 1 ? 0 : 1);
  }
  char byte = 'n';
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  if (byte == 'y') {
    const std::optional<ProcessState> process = process_state(child);
    ASSERT_TRUE(process);
    EXPECT_EQ(process->name, "a) Z (1 2");
    EXPECT_EQ(process->threads, 1);
  }
  ASSERT_EQ(write(done[1], &byte, 1), 1);
  waitpid(child, nullptr, 0);
}

TEST(MachineStateSmall, IsOfThisMachine) {
  const MachineState machine = machine_state();
  EXPECT_GE(machine.cpus, 1);
  EXPECT_GT(machine.all_seconds, 0);
  EXPECT_GE(machine.all_seconds, machine.busy_seconds);
  EXPECT_GE(machine.load, 0);
  EXPECT_GT(machine.memory_bytes, 64 * kMiB);
  EXPECT_GE(machine.memory_bytes, machine.memory_available_bytes);
}

}  // namespace
}  // namespace fattn::measure
