/* Copies more than fits, by a call that knows the room. */
#include <stddef.h>

void *__memcpy_chk(void *, const void *, size_t, size_t);

int main(void)
{
    static char target[8], source[16];
    __memcpy_chk(target, source, sizeof source, sizeof target);
    return 0;
}
