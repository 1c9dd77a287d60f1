// Where an arena's bytes are: anonymous memory or a file. Positions are host addresses or offsets in the file.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "faults.h"
#include "status.h"

namespace hal {

// Every size and position of a backup is a multiple: the page, and at least what direct input and output asks for.
uint64_t backup_alignment();

class FileStorage;

class Storage {
 public:
  virtual ~Storage() = default;
  // Bytes that the system would still give.
  virtual Status available(uint64_t* bytes) = 0;
  // Takes `size` bytes; changes nothing when it fails.
  virtual Status add(uint64_t size, uint64_t* position) = 0;
  // Gives back any aligned part of what was taken.
  virtual void remove(uint64_t position, uint64_t size) = 0;
  virtual FileStorage* file() { return nullptr; }  // not null: the bytes are reached by read and write only
};

class MemoryStorage : public Storage {
 public:
  explicit MemoryStorage(Faults& faults) : faults_(faults) {}
  Status available(uint64_t* bytes) override;
  Status add(uint64_t size, uint64_t* position) override;
  void remove(uint64_t position, uint64_t size) override;

 private:
  Faults& faults_;
};

// A file without a name: nothing is left of it when the process ends, however it ends.
class FileStorage : public Storage {
 public:
  static Status open(const std::string& directory, Faults& faults, std::unique_ptr<FileStorage>* out);
  ~FileStorage() override;
  Status available(uint64_t* bytes) override;
  Status add(uint64_t size, uint64_t* position) override;
  void remove(uint64_t position, uint64_t size) override;
  FileStorage* file() override { return this; }

  bool direct() const { return direct_; }  // reads and writes go around the page cache
  Status write(const void* data, uint64_t size, uint64_t position);
  Status read(void* data, uint64_t size, uint64_t position);
  // Puts what was written on the disk and takes it out of the page cache.
  Status flush();
  // Takes what was read out of the page cache.
  void forget(uint64_t size, uint64_t position);

 private:
  FileStorage(int descriptor, bool direct, std::string directory, Faults& faults)
      : descriptor_(descriptor), direct_(direct), directory_(std::move(directory)), faults_(faults) {}
  Status allocate(uint64_t size, uint64_t position);
  Status failed(const char* call, int number, uint64_t size) const;

  const int descriptor_;
  const bool direct_;
  const std::string directory_;
  Faults& faults_;
  // Only the arena's growth changes these, and it holds the arena's growth mutex.
  uint64_t end_ = 0;
  std::map<uint64_t, uint64_t> holes_;  // parts below `end_` that were given back: position to size
};

}  // namespace hal
