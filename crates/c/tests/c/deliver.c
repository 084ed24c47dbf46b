/* Gather copies: messages in packets, as they lie in a ring of buffers. */

#define _POSIX_C_SOURCE 200809L

#include "check.h"

enum { BUFFER = 2048, OFFSET = 66, PACKET = 1460, MOST = 3000 };

static unsigned char *ring, *message;
static struct adma_piece pieces[MOST];

static void lay_out(unsigned count) {
    for (size_t n = 0; n < count; n++) {
        unsigned char *packet = ring + n * BUFFER + OFFSET;
        for (size_t i = 0; i < PACKET; i++) packet[i] = byte_at(n * PACKET + i, count);
        pieces[n].addr = packet;
        pieces[n].len = PACKET;
    }
    memset(message, 0xee, MOST * PACKET + 8);
}

static void every_packet_goes_where_it_is_wanted(void) {
    static const unsigned COUNTS[] = {1, 2, 45, 719, MOST};
    for (unsigned n = 0; n < sizeof COUNTS / sizeof COUNTS[0]; n++) {
        size_t count = COUNTS[n], len = count * PACKET;
        lay_out(COUNTS[n]);
        int64_t cookie = adma_ideliver(pieces, count, message);
        CHECK(cookie >= 0);
        /* The list may be freed now. */
        memset(pieces, 0xff, sizeof pieces);
        CHECK_IS(adma_wait_copy(cookie), 0);
        CHECK_IS(adma_check_copy(cookie), 1);
        CHECK(is_painted(message, len, COUNTS[n]));
        CHECK_IS(message[len], 0xee);
    }
}

static void one_notification_comes_behind_all_packets(void) {
    uint64_t variable = 0;
    for (unsigned round = 1; round < 50; round++) {
        unsigned count = round * 7;
        lay_out(count);
        int64_t cookie = adma_ideliver_notify(pieces, count, message, &variable, round);
        CHECK(cookie >= 0);
        if (round % 2 == 0) CHECK_IS(adma_wait_notify(&variable, round, -1), 0);
        while (__atomic_load_n(&variable, __ATOMIC_ACQUIRE) != round) {
        }
        CHECK(is_painted(message, (size_t)count * PACKET, count));
        CHECK_IS(adma_wait_copy(cookie), 0);
    }
}

static void nothing_is_delivered_from_and_to_anywhere(void) {
    struct adma_piece empty[3] = {{NULL, 0}, {ring, 0}, {NULL, 0}};
    uint64_t variable = 0;
    CHECK_IS(adma_wait_copy(adma_ideliver(NULL, 0, NULL)), 0);
    CHECK_IS(adma_wait_copy(adma_ideliver(empty, 3, NULL)), 0);
    CHECK_IS(adma_wait_copy(adma_ideliver_notify(NULL, 0, NULL, &variable, 4)), 0);
    CHECK_IS(variable, 4);
}

static void what_makes_no_sense_starts_nothing(void) {
    uint64_t variable = 3;
    lay_out(2);
    CHECK_IS(adma_ideliver(NULL, 2, message), ADMA_EFAULT);
    CHECK_SAYS("adma_ideliver: the list of 2 pieces is a null pointer");
    CHECK_IS(adma_ideliver(pieces, SIZE_MAX, message), ADMA_EOVERFLOW);
    CHECK_IS(adma_ideliver(pieces, 2, NULL), ADMA_EFAULT);
    CHECK_SAYS("the target is a null pointer");
    CHECK_IS(adma_ideliver(pieces, 2, (void *)(UINTPTR_MAX - 15)), ADMA_EOVERFLOW);
    CHECK_IS(adma_ideliver(pieces, 2, ring + OFFSET + 1), ADMA_EINVAL);
    CHECK_SAYS("overlaps the target");
    CHECK_IS(adma_ideliver_notify(pieces, 2, message, NULL, 1), ADMA_EFAULT);
    pieces[1].addr = NULL;
    CHECK_IS(adma_ideliver_notify(pieces, 2, message, &variable, 1), ADMA_EFAULT);
    CHECK_SAYS("adma_ideliver_notify: the source is a null pointer");
    CHECK_IS(variable, 3);
    CHECK_IS(message[0], 0xee);
}

int main(void) {
    bound_time();
    ring = take((size_t)MOST * BUFFER);
    message = take((size_t)MOST * PACKET + 8);
    every_packet_goes_where_it_is_wanted();
    one_notification_comes_behind_all_packets();
    nothing_is_delivered_from_and_to_anywhere();
    what_makes_no_sense_starts_nothing();
    free(ring);
    free(message);
    return 0;
}
