//! Cells of the rings, packets of the handshake and handles of windows, decoded.

use memferry_message::{WindowHandle, fuzz};

pub(crate) fn run(bytes: &[u8]) {
    fuzz::handshake(bytes);
    for cell in bytes.chunks_exact(64) {
        let mut words = [0; 8];
        for (word, bytes) in words.iter_mut().zip(cell.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        fuzz::cell(&words);
    }
    for handle in bytes.as_chunks::<{ WindowHandle::BYTES }>().0 {
        if let Ok(known) = WindowHandle::from_bytes(*handle) {
            assert_eq!(known.to_bytes(), *handle);
        }
    }
}
