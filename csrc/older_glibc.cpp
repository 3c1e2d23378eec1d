// What GCC 8's libstdc++ has not: containers of newer headers call it where a size overflows.

#include <new>

namespace std {

__attribute__((visibility("hidden"), noreturn)) void __throw_bad_array_new_length() {
    throw bad_array_new_length();
}

} // namespace std
