// A nameless file for backups, written around the page cache where the filesystem allows it: a sleeping process has to
// give its memory back, and pages in the cache would still be charged to it. Touches one directory and one descriptor.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "storage.h"

namespace hal {
namespace {

constexpr uint64_t kLargestTransfer = 1u << 30;  // one read or write; the kernel caps at 2 GiB less a page

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }
  bool valid() const { return number_ >= 0; }
  int take() { return std::exchange(number_, -1); }

 private:
  int number_;
};

bool on_memory(int descriptor) {
  struct statfs info;
  if (fstatfs(descriptor, &info) != 0) return false;
  const auto type = static_cast<uint64_t>(info.f_type) & 0xFFFFFFFFu;
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC || type == HUGETLBFS_MAGIC;
}

// Opens a file that has no name, or loses it at once where the filesystem has no O_TMPFILE.
int open_nameless(const std::string& directory, int extra_flags) {
  const int flags = O_RDWR | O_EXCL | O_CLOEXEC | extra_flags;
  const int descriptor = open(directory.c_str(), O_TMPFILE | flags, 0600);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return descriptor;
  std::string path = directory + "/.hal-backup-XXXXXX";
  const int named = mkostemp(path.data(), O_CLOEXEC | extra_flags);
  if (named >= 0) unlink(path.c_str());
  return named;
}

// Some filesystems take O_DIRECT at open and refuse it at the first write.
bool direct_works(int descriptor) {
  void* block = nullptr;
  const uint64_t size = backup_alignment();
  if (posix_memalign(&block, size, size) != 0) return false;
  std::fill_n(static_cast<char*>(block), size, '\0');
  const bool works = pwrite(descriptor, block, size, 0) == static_cast<ssize_t>(size);
  std::free(block);
  return ftruncate(descriptor, 0) == 0 && works;
}

Status of_unknown_size(Status status) {
  status.set_memory(kUnknownBytes, kUnknownBytes, 0);
  return status;
}

Status refused(int number, const std::string& directory) {
  return of_unknown_size(
      Status::host_error(HAL_HOST_MEMORY, "file open", number,
                         "no backup file can be made in '" + directory + "'; name a writable directory on a disk"));
}

Status room_of(int descriptor, uint64_t* bytes) {
  struct statvfs info;
  if (fstatvfs(descriptor, &info) != 0) {
    return Status::host_error(HAL_HOST_MEMORY, "file space", errno, "the disk does not tell its free space");
  }
  *bytes = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  return {};
}

}  // namespace

Status FileStorage::open(const std::string& directory, Faults& faults, std::unique_ptr<FileStorage>* out) {
  if (directory.empty()) return Status::invalid("file open", "a file arena needs a directory");
  Descriptor place(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!place.valid()) return refused(errno, directory);
  if (on_memory(place.get())) {
    return of_unknown_size(
        Status::error(HAL_HOST_MEMORY, "file open", ENOTSUP,
                      "'" + directory + "' is on a tmpfs, which is memory itself; name a directory on a disk"));
  }
  Descriptor file(open_nameless(directory, O_DIRECT));
  bool direct = file.valid() && direct_works(file.get());
  if (direct) {
    out->reset(new FileStorage(file.take(), true, directory, faults));
    return {};
  }
  Descriptor cached(open_nameless(directory, 0));
  if (!cached.valid()) return refused(errno, directory);
  out->reset(new FileStorage(cached.take(), false, directory, faults));
  return {};
}

FileStorage::~FileStorage() {
  close(descriptor_);
}

Status FileStorage::available(uint64_t* bytes) {
  return room_of(descriptor_, bytes);
}

Status FileStorage::failed(const char* call, int number, uint64_t size) const {
  const bool full = number == ENOSPC || number == EDQUOT || number == EFBIG || number == ENOMEM;
  Status status = Status::host_error(full ? HAL_HOST_MEMORY : HAL_DRIVER_ERROR, call, number,
                                     "the backup file in '" + directory_ + "'", size);
  if (full) status.set_memory(size, kUnknownBytes, 0);
  return status;
}

// Allocates disk blocks now, so that a full disk is found before anything has changed.
Status FileStorage::allocate(uint64_t size, uint64_t position) {
  int result;
  do {
    result = fallocate(descriptor_, 0, static_cast<off_t>(position), static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return {};
  if (errno != EOPNOTSUPP && errno != ENOSYS) return failed("arena grow", errno, size);
  uint64_t room = 0;
  HAL_TRY(room_of(descriptor_, &room));
  if (room < size) return failed("arena grow", ENOSPC, size);
  if (position + size > end_ && ftruncate(descriptor_, static_cast<off_t>(position + size)) != 0) {
    return failed("arena grow", errno, size);
  }
  return {};
}

Status FileStorage::add(uint64_t size, uint64_t* position) {
  int code = 0;
  if (faults_.fires("arena grow", &code)) return failed("arena grow", code, size);
  const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const auto& h) { return h.second >= size; });
  const uint64_t start = hole == holes_.end() ? end_ : hole->first;
  Status status = allocate(size, start);
  if (!status.ok()) {
    fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start),
              static_cast<off_t>(size));
    if (ftruncate(descriptor_, static_cast<off_t>(end_)) != 0) return status;
    return status;
  }
  if (hole == holes_.end()) {
    end_ += size;
  } else {
    const uint64_t left = hole->second - size;
    holes_.erase(hole);
    if (left > 0) holes_[start + size] = left;
  }
  *position = start;
  return {};
}

void FileStorage::remove(uint64_t position, uint64_t size) {
  auto next = holes_.lower_bound(position);
  uint64_t begin = position, end = position + size;
  if (next != holes_.begin() && std::prev(next)->first + std::prev(next)->second == begin) {
    begin = std::prev(next)->first;
    holes_.erase(std::prev(next));
  }
  if (next != holes_.end() && next->first == end) {
    end += next->second;
    holes_.erase(next);
  }
  if (end == end_ && ftruncate(descriptor_, static_cast<off_t>(begin)) == 0) {
    end_ = begin;
    return;
  }
  // Where holes cannot be punched the blocks come back when the end of the file does.
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(position),
            static_cast<off_t>(size));
  holes_[begin] = end - begin;
}

Status FileStorage::write(const void* data, uint64_t size, uint64_t position) {
  int code = 0;
  if (faults_.fires("file write", &code)) return failed("file write", code, size);
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t done = pwrite(descriptor_, from, std::min(size, kLargestTransfer), static_cast<off_t>(position));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return failed("file write", done < 0 ? errno : ENOSPC, size);
    from += done, position += static_cast<uint64_t>(done), size -= static_cast<uint64_t>(done);
  }
  return {};
}

Status FileStorage::read(void* data, uint64_t size, uint64_t position) {
  int code = 0;
  if (faults_.fires("file read", &code)) return failed("file read", code, size);
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t done = pread(descriptor_, to, std::min(size, kLargestTransfer), static_cast<off_t>(position));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return failed("file read", done < 0 ? errno : EIO, size);
    to += done, position += static_cast<uint64_t>(done), size -= static_cast<uint64_t>(done);
  }
  return {};
}

Status FileStorage::flush() {
  if (direct_) return {};
  if (fdatasync(descriptor_) != 0) return failed("file write", errno, 0);
  posix_fadvise(descriptor_, 0, 0, POSIX_FADV_DONTNEED);
  return {};
}

void FileStorage::forget(uint64_t size, uint64_t position) {
  if (direct_) return;
  posix_fadvise(descriptor_, static_cast<off_t>(position), static_cast<off_t>(size), POSIX_FADV_DONTNEED);
}

}  // namespace hal
