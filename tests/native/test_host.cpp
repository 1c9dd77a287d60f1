// Host memory under cgroups, from trees of files, and the checksum.
#include <sys/stat.h>

#include <fstream>

#include "check.h"
#include "crc32c.h"
#include "host_memory.h"
#include "machine.h"

namespace {

constexpr uint64_t GiB = uint64_t{1} << 30;

// A root directory with what the reader looks at.
class Tree {
 public:
  Tree() : root_(scratch_directory() + "/hal-test-tree") {
    CHECK(std::system(("rm -rf " + root_).c_str()) == 0);
    write("/proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n");
  }
  ~Tree() { static_cast<void>(std::system(("rm -rf " + root_).c_str()) == 0); }

  void write(const std::string& path, const std::string& text) const {
    const std::string whole = root_ + path;
    CHECK(std::system(("mkdir -p " + whole.substr(0, whole.rfind('/'))).c_str()) == 0);
    std::ofstream(whole) << text;
  }
  hal_host_info read() const {
    hal_host_info info;
    CHECK(hal::read_host_memory(root_, &info).ok());
    return info;
  }
  const std::string& root() const { return root_; }

 private:
  const std::string root_;
};

}  // namespace

TEST(without_cgroups_the_kernel_decides) {
  Tree tree;
  CHECK_EQ(tree.read().available, 32 * GiB);
  CHECK_EQ(tree.read().total, 64 * GiB);
  CHECK_EQ(std::string(tree.read().source), std::string("meminfo"));
}

TEST(version_2_takes_the_least_of_all_ancestors) {
  Tree tree;
  tree.write("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n");
  tree.write("/proc/self/cgroup", "0::/pod/box\n");
  tree.write("/sys/fs/cgroup/pod/box/memory.max", "max\n");
  tree.write("/sys/fs/cgroup/pod/memory.max", "8589934592\n");
  tree.write("/sys/fs/cgroup/pod/memory.current", "6442450944\n");
  tree.write("/sys/fs/cgroup/pod/memory.stat", "anon 5\ninactive_file 2147483648\nactive_file 7\n");
  CHECK_EQ(tree.read().available, 4 * GiB);
  CHECK_EQ(tree.read().total, 8 * GiB);
  CHECK_EQ(std::string(tree.read().source), std::string("cgroup v2"));
}

TEST(version_1_counts_what_the_cache_can_give_back) {
  Tree tree;
  tree.write("/proc/self/mountinfo",
             "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
             "35 31 0:32 /docker/box /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n");
  tree.write("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/box/app\n0::/\n");
  tree.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  tree.write("/sys/fs/cgroup/memory/app/memory.limit_in_bytes", "4294967296\n");
  tree.write("/sys/fs/cgroup/memory/app/memory.usage_in_bytes", "4294967296\n");
  tree.write("/sys/fs/cgroup/memory/app/memory.stat", "inactive_file 1\ntotal_inactive_file 1073741824\n");
  CHECK_EQ(tree.read().available, GiB);
  CHECK_EQ(std::string(tree.read().source), std::string("cgroup v1"));
}

TEST(a_path_outside_of_the_mount_falls_back_to_the_mount) {
  Tree tree;
  tree.write("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  tree.write("/proc/self/cgroup", "0::/../other\n");
  tree.write("/sys/fs/cgroup/memory.max", "1073741824\n");
  tree.write("/sys/fs/cgroup/memory.current", "2147483648\n");
  CHECK_EQ(tree.read().available, 0u);
}

TEST(a_missing_proc_is_a_typed_error) {
  hal_host_info info;
  CHECK_EQ(hal::read_host_memory("/nonexistent", &info).kind(), HAL_UNSUPPORTED);
}

TEST(crc32c_gives_the_published_values) {
  // RFC 3720, appendix B.4.
  std::vector<uint8_t> zeros(32, 0), ones(32, 0xFF), rising(32);
  for (size_t i = 0; i < rising.size(); ++i) rising[i] = static_cast<uint8_t>(i);
  for (auto* crc : {hal::crc32c, hal::crc32c_portable}) {
    CHECK_EQ(crc(zeros.data(), 32), 0x8A9136AAu);
    CHECK_EQ(crc(ones.data(), 32), 0x62A8AB43u);
    CHECK_EQ(crc(rising.data(), 32), 0x46DD794Eu);
    CHECK_EQ(crc("123456789", 9), 0xE3069283u);
    CHECK_EQ(crc("", 0), 0u);
  }
  std::vector<uint8_t> bytes(1000003);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(pattern_word(i, 5));
  CHECK_EQ(hal::crc32c(bytes.data(), bytes.size()), hal::crc32c_portable(bytes.data(), bytes.size()));
}

TEST_MAIN()
