//! What a fuzzer needs of the parts that nobody outside sees.

use crate::connect::hello::{Hello, Welcome};
use crate::pieces::MOST_PIECES;
use crate::ring::cells::Words;
use crate::ring::layout::{RECORDS, SPACE_BYTES};
use crate::ring::space::Span;
use crate::wire::{Manner, Note, Place, inline_limit};

/// Decodes a cell. Fails if what it means does not lie inside of what is shared, or if the words of the same
/// note mean something else.
pub fn cell(words: &Words) {
    let Ok(note) = Note::decode(words) else { return };
    assert_eq!(Note::decode(&note.encode()), Ok(note), "the note did not survive its words");
    match note {
        Note::Inline { envelope, length, .. } => {
            assert!(usize::from(length) <= inline_limit(&envelope));
        }
        Note::Eager { first, length, .. } => {
            check_span(first);
            assert!(u64::from(first.length) <= length);
        }
        Note::Fragment { data, .. } => check_span(data),
        Note::Request { source, .. } => check_place(source),
        Note::Accept { manner: Manner::Together { record, chunk_bytes, target, .. }, .. } => {
            assert!(usize::from(record) < RECORDS && chunk_bytes > 0);
            check_place(target);
        }
        _ => {}
    }
}

fn check_span(span: Span) {
    assert!(span.offset as usize + span.length as usize <= SPACE_BYTES, "{span:?}");
}

fn check_place(place: Place) {
    if let Place::List { list, count } = place {
        check_span(list);
        assert!(count as usize <= MOST_PIECES);
    }
}

/// Decodes the packets of a handshake. Fails if one does not survive being encoded again.
pub fn handshake(packet: &[u8]) {
    if let Ok(hello) = Hello::decode(packet) {
        let again = Hello::decode(&hello.encode()).expect("it was understood before");
        // A name that is too long is left out.
        assert_eq!((again.identity, again.probe), (hello.identity, hello.probe));
    }
    if let Some(welcome) = Welcome::decode(packet) {
        assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
    }
}
