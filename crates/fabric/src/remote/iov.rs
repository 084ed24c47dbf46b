//! The memory of messages as iovecs for the inner endpoint, and copies where it cannot take them.

use memferry_message::Segment;

/// The segments that contain the first `length` bytes.
fn segments_up_to(segments: &[Segment], length: u64) -> impl Iterator<Item = Segment> + '_ {
    let mut remaining = length;
    segments.iter().filter_map(move |segment| {
        let take = (segment.length as u64).min(remaining);
        remaining -= take;
        (take > 0).then_some(Segment { address: segment.address, length: take as usize })
    })
}

/// The sum of all lengths, in bytes.
pub(super) fn total(segments: &[Segment]) -> u64 {
    segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.length as u64))
}

/// The first `length` bytes as at most `max` iovecs.
pub(super) fn vectors(segments: &[Segment], length: u64, max: usize) -> Option<Vec<libc::iovec>> {
    let vectors: Vec<_> = segments_up_to(segments, length).take(max + 1).map(vector).collect();
    (vectors.len() <= max).then_some(vectors)
}

fn vector(segment: Segment) -> libc::iovec {
    libc::iovec { iov_base: segment.address.cast(), iov_len: segment.length }
}

/// An iovec of a bounce buffer.
pub(super) fn bounce_vector(bytes: &mut Vec<u8>) -> Vec<libc::iovec> {
    vec![vector(Segment { address: bytes.as_mut_ptr(), length: bytes.len() })]
}

/// Appends the first `length` bytes of the segments.
///
/// # Safety
/// The segments must be valid for reads.
pub(super) unsafe fn gather(segments: &[Segment], length: u64, bytes: &mut Vec<u8>) {
    for part in segments_up_to(segments, length) {
        // SAFETY: the caller guarantees it, for a part of a segment.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(part.address, part.length) });
    }
}

/// Copies bytes to the segments, as many as fit.
///
/// # Safety
/// The segments must be valid for writes.
pub(super) unsafe fn scatter(segments: &[Segment], mut bytes: &[u8]) {
    for part in segments_up_to(segments, bytes.len() as u64) {
        let (now, later) = bytes.split_at(part.length);
        // SAFETY: the caller guarantees it; the bytes belong to this side, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), part.address, part.length) };
        bytes = later;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_cut_where_the_length_ends() {
        let mut memory = [0u8; 30];
        let at = memory.as_mut_ptr();
        let segments =
            [(0, 5), (10, 0), (20, 10)].map(|(o, l)| Segment::target(at.wrapping_add(o), l));
        assert_eq!(total(&segments), 15);
        let mut back = Vec::new();
        // SAFETY: all segments lie in `memory`.
        unsafe {
            scatter(&segments, b"0123456789");
            gather(&segments, 8, &mut back);
        }
        assert_eq!((&memory[..5], &memory[20..26]), (&b"01234"[..], &b"56789\0"[..]));
        assert_eq!(back, b"01234567");
        let lengths = |length, max| {
            vectors(&segments, length, max)
                .map(|all| all.iter().map(|one| one.iov_len).collect::<Vec<_>>())
        };
        assert_eq!(lengths(7, 2), Some(vec![5, 2]));
        assert_eq!(lengths(5, 1), Some(vec![5]));
        assert_eq!(lengths(6, 1), None);
    }
}
