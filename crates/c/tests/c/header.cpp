// The header means the same to C++. Compiled for its syntax only.

#include "adma.h"

#include <atomic>
#include <cstdint>

static_assert(ADMA_EFAULT == -14, "codes are constants");
static_assert(sizeof(adma_window) == 16, "a handle is 16 bytes");

int all_calls(const void *src, void *dst, std::atomic<std::uint64_t> &variable);

int all_calls(const void *src, void *dst, std::atomic<std::uint64_t> &variable) {
    auto *word = reinterpret_cast<std::uint64_t *>(&variable);
    std::size_t at = 0;
    std::int64_t cookie = adma_icopy(src, dst, 1);
    std::int64_t other = adma_icopy_notify(src, dst, 1, word, 1);
    adma_piece piece = {src, 1};
    other += adma_ideliver(&piece, 1, dst) + adma_ideliver_notify(&piece, 1, dst, word, 1);
    adma_copy_item copied = {src, dst, 1};
    adma_fill_item filled = {dst, 1, 7};
    other += adma_icopy_many(&copied, 1, nullptr) + adma_ifill_many(&filled, 1, &cookie);
    const char *texts[] = {adma_strerror(0), adma_last_error(), adma_version()};
    int sum = adma_init() + adma_copy(src, dst, 1) + adma_fill(dst, 0, 1);
    std::uint32_t crc = 0;
    sum += adma_crc(src, 1, &crc) + adma_copy_crc(src, dst, 1, &crc) + adma_dualcast(src, dst, dst, 1);
    other += adma_icrc(src, 1, &crc) + adma_icopy_crc(src, dst, 1, &crc) + adma_idualcast(src, dst, dst, 1);
    sum += adma_compare(src, dst, 1, &at) + adma_check_copy(cookie) + adma_wait_copy(other);
    sum += adma_wait_notify(word, 1, -1) + adma_fini();
    int listener = adma_listen("name"), link = adma_connect("name");
    cookie = adma_iread(adma_accept(listener), dst, 1) + adma_read(link, dst, 1);
    other = adma_iwrite(link, src, 1) + adma_result(cookie) + adma_peek(link);
    sum += adma_write(link, src, 1) + adma_check(other) + adma_wait(other);
    sum += adma_lengths(cookie, word, nullptr) + adma_close(link);
    adma_window handle = {};
    std::int64_t window = adma_expose(link, dst, 16, ADMA_READ | ADMA_WRITE, &handle);
    std::int64_t remote = adma_attach(link, &handle) + adma_window_length(window);
    cookie = adma_iput(remote, 0, src, 1) + adma_iput_notify(remote, 0, src, 1, 8, 1);
    other = adma_iget(remote, 0, dst, 1);
    sum += adma_put(remote, 0, src, 1) + adma_put_notify(remote, 0, src, 1, 8, 1);
    sum += adma_get(remote, 0, dst, 1) + adma_fence(remote) + adma_detach(remote);
    sum += adma_wait_value(window, 8, 1, -1, word) + adma_withdraw(window);
    void *device = nullptr;
    sum += adma_use_gpu(0) + adma_device_alloc(1, &device) + adma_device_free(device);
    sum += adma_register(src, 1) + adma_unregister(src);
    return texts[0] == texts[1] ? sum : 0;
}
