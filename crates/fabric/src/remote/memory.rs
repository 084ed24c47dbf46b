//! The memory of messages as the inner endpoint takes it, and copies where it cannot.

use memferry_message::Piece;

/// The pieces that make up the first `length` bytes.
fn parts(pieces: &[Piece], length: u64) -> impl Iterator<Item = Piece> + '_ {
    let mut left = length;
    pieces.iter().filter_map(move |piece| {
        let take = (piece.length as u64).min(left);
        left -= take;
        (take > 0).then_some(Piece { address: piece.address, length: take as usize })
    })
}

/// The bytes of all pieces together.
pub(super) fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.length as u64))
}

/// The first bytes as the inner endpoint takes them, if it takes so many pieces.
pub(super) fn vectors(pieces: &[Piece], length: u64, most: usize) -> Option<Vec<libc::iovec>> {
    let vectors: Vec<_> = parts(pieces, length).take(most + 1).map(vector).collect();
    (vectors.len() <= most).then_some(vectors)
}

fn vector(piece: Piece) -> libc::iovec {
    libc::iovec { iov_base: piece.address.cast(), iov_len: piece.length }
}

/// One piece for bytes of this side's own.
pub(super) fn own_vector(bytes: &mut Vec<u8>) -> Vec<libc::iovec> {
    vec![vector(Piece { address: bytes.as_mut_ptr(), length: bytes.len() })]
}

/// Appends the first bytes of the pieces.
///
/// # Safety
/// The pieces must be valid for reads.
pub(super) unsafe fn gather(pieces: &[Piece], length: u64, bytes: &mut Vec<u8>) {
    for part in parts(pieces, length) {
        // SAFETY: the caller's promise, for a part of a piece.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(part.address, part.length) });
    }
}

/// Copies bytes to the pieces, as many as fit.
///
/// # Safety
/// The pieces must be valid for writes.
pub(super) unsafe fn scatter(pieces: &[Piece], mut bytes: &[u8]) {
    for part in parts(pieces, bytes.len() as u64) {
        let (now, later) = bytes.split_at(part.length);
        // SAFETY: the caller's promise; the bytes are this side's own, so they do not overlap.
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
        let pieces = [(0, 5), (10, 0), (20, 10)].map(|(o, l)| Piece::target(at.wrapping_add(o), l));
        assert_eq!(total(&pieces), 15);
        let mut back = Vec::new();
        // SAFETY: all pieces lie in `memory`.
        unsafe {
            scatter(&pieces, b"0123456789");
            gather(&pieces, 8, &mut back);
        }
        assert_eq!((&memory[..5], &memory[20..26]), (&b"01234"[..], &b"56789\0"[..]));
        assert_eq!(back, b"01234567");
        let lengths = |length, most| {
            vectors(&pieces, length, most)
                .map(|all| all.iter().map(|one| one.iov_len).collect::<Vec<_>>())
        };
        assert_eq!(lengths(7, 2), Some(vec![5, 2]));
        assert_eq!(lengths(5, 1), Some(vec![5]));
        assert_eq!(lengths(6, 1), None);
    }
}
