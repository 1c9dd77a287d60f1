// A checker in a page: tests register themselves, a failed check says where and what, and the program ends with 1.
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

struct Failed : std::exception {};

inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  throw Failed();
}

template <typename A, typename B>
void equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (a == b) return;
  std::ostringstream what;
  what << text << ": " << a << " against " << b;
  fail(file, line, what.str());
}

}  // namespace check

#define TEST(name)                                           \
  static void name();                                        \
  static const check::Register register_##name{#name, name}; \
  static void name()

#define CHECK(condition) ((condition) ? static_cast<void>(0) : check::fail(__FILE__, __LINE__, "not true: " #condition))
#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a " == " #b, a, b)

#define TEST_MAIN()                                                  \
  int main(int count, char** names) {                                \
    int failures = 0;                                                \
    for (const check::Test& test : check::tests()) {                 \
      if (count > 1 && std::string(names[1]) != test.name) continue; \
      try {                                                          \
        test.body();                                                 \
        std::printf("ok      %s\n", test.name);                      \
      } catch (const check::Failed&) {                               \
        std::printf("FAILED  %s\n", test.name);                      \
        ++failures;                                                  \
      }                                                              \
      std::fflush(stdout);                                           \
    }                                                                \
    return failures == 0 ? 0 : 1;                                    \
  }
