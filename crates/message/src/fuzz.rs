//! Entry points of the fuzzer into private decoders.

use crate::connect::handshake::{ConnectReply, ConnectRequest};
use crate::control::{BufferRef, ControlMessage, RendezvousMode, inline_limit};
use crate::ring::bounce::BounceSpan;
use crate::ring::cells::CellWords;
use crate::ring::layout::{BOUNCE_BYTES, CLAIM_SLOTS};
use crate::segments::MAX_SEGMENTS;

/// Decodes a cell. Panics if the result refers to anything outside the shared memory, or if
/// encoding and decoding it again changes it.
pub fn cell(words: &CellWords) {
    let Ok(message) = ControlMessage::decode(words) else { return };
    assert_eq!(
        ControlMessage::decode(&message.encode()),
        Ok(message),
        "encoding and decoding changed the message"
    );
    match message {
        ControlMessage::Inline { envelope, length, .. } => {
            assert!(usize::from(length) <= inline_limit(&envelope));
        }
        ControlMessage::Eager { first, length, .. } => {
            check_span(first);
            assert!(u64::from(first.length) <= length);
        }
        ControlMessage::Fragment { data, .. } => check_span(data),
        ControlMessage::Rts { source, .. } => check_buffer(source),
        ControlMessage::Cts {
            mode: RendezvousMode::Cooperative { claim_slot, chunk_bytes, target, .. },
            ..
        } => {
            assert!(usize::from(claim_slot) < CLAIM_SLOTS && chunk_bytes > 0);
            check_buffer(target);
        }
        _ => {}
    }
}

fn check_span(span: BounceSpan) {
    assert!(span.offset as usize + span.length as usize <= BOUNCE_BYTES, "{span:?}");
}

fn check_buffer(buffer: BufferRef) {
    if let BufferRef::SegmentList { list, count } = buffer {
        check_span(list);
        assert!(count as usize <= MAX_SEGMENTS);
    }
}

/// Decodes the packets of a handshake. Panics if encoding and decoding a packet again changes it.
pub fn handshake(packet: &[u8]) {
    if let Ok(request) = ConnectRequest::decode(packet) {
        let again = ConnectRequest::decode(&request.encode()).expect("the encoded request decodes");
        // The encoder omits a name that is too long.
        assert_eq!((again.identity, again.probe), (request.identity, request.probe));
    }
    if let Some(reply) = ConnectReply::decode(packet) {
        assert_eq!(ConnectReply::decode(&reply.encode()), Some(reply));
    }
}
