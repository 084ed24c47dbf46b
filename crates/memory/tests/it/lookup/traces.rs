//! Recording, reading and replaying of traces.

use std::io::{self, Write};

use memferry_memory::lookup::trace::{TraceError, TraceReader, TraceRecord, replay};
use memferry_memory::lookup::{DataPath, Geometry, LookupConfig, LookupCounters};
use proptest::prelude::*;

use crate::lookup::support::{SharedBuffer, lookup, page, page_bytes};

const HEADER: &[u8] = b"memferry trace 1";

/// Runs accesses with evictions, an invalidated range and a replaced process.
fn recorded(geometry: Geometry) -> (Vec<u8>, LookupCounters) {
    let (mut lookup, _) = lookup(LookupConfig::cached(geometry));
    let paper = SharedBuffer::default();
    lookup.start_recording(Box::new(paper.clone())).unwrap();
    let mut processes = [lookup.add_process().unwrap(), lookup.add_process().unwrap()];
    let mut records = 0;
    for step in 0..3000u64 {
        let process = &mut processes[(step % 7 / 5) as usize];
        let route = if step % 3 == 0 { DataPath::Send } else { DataPath::Receive };
        drop(lookup.translate(page(*process, step * step % 97), route).unwrap());
        records += 1;
        if step % 500 == 499 {
            lookup.invalidate(*process, 3 * page_bytes(), 9 * page_bytes());
            records += 1;
        }
        if step % 1000 == 999 {
            lookup.remove_process(*process);
            *process = lookup.add_process().unwrap();
            records += 1;
        }
    }
    assert_eq!(lookup.end_recording().unwrap(), records);
    // After the end of the recording nothing is written.
    let bytes = paper.contents();
    let counters = lookup.counters();
    drop(lookup.translate(page(processes[0], 1), DataPath::Send).unwrap());
    assert_eq!(paper.contents().len(), bytes.len());
    (bytes, counters)
}

#[test]
fn a_replay_counts_what_the_program_counted() {
    let geometry = Geometry::new(64, 4, 4).unwrap();
    let (bytes, counters) = recorded(geometry);
    let again = replay(&bytes[..], geometry).unwrap();
    assert!(counters.evictions > 100 && counters.misses.send.capacity > 0);
    let numbers = |counters: LookupCounters| {
        (counters.hits, counters.misses, counters.fills, counters.evictions, counters.detached)
    };
    assert_eq!(numbers(again), numbers(counters));
}

#[test]
fn a_larger_cache_misses_less_in_a_replay() {
    let (bytes, small) = recorded(Geometry::new(64, 4, 4).unwrap());
    let large = replay(&bytes[..], Geometry::new(1024, 4, 4).unwrap()).unwrap();
    assert!(large.miss_ratio() < small.miss_ratio() / 2.0);
    assert_eq!(large.misses.send.cold + large.misses.receive.cold, large.fills);
}

#[test]
fn accesses_are_read_as_they_were_written() {
    let (mut lookup, _) = lookup(LookupConfig::cached(Geometry::new(64, 8, 4).unwrap()));
    let paper = SharedBuffer::default();
    lookup.start_recording(Box::new(paper.clone())).unwrap();
    let process = lookup.add_process().unwrap();
    let last = (1 << 57) / page_bytes() - 1;
    drop(lookup.translate(page(process, last), DataPath::Receive).unwrap());
    drop(lookup.find(page(process, 5), DataPath::Send).unwrap());
    lookup.invalidate(process, 0, u64::MAX);
    lookup.invalidate(process, 0, 0);
    lookup.remove_process(process);
    lookup.end_recording().unwrap();
    let bytes = paper.contents();
    let accesses: Vec<_> = TraceReader::new(&bytes[..]).unwrap().map(Result::unwrap).collect();
    let process = process.number();
    let expected = [
        TraceRecord::Lookup { process, page: last, path: DataPath::Receive },
        TraceRecord::Lookup { process, page: 5, path: DataPath::Send },
        TraceRecord::Invalidated { process, pages: 0..last + 1 },
        TraceRecord::ProcessRemoved { process },
    ];
    assert_eq!(accesses, expected);
}

#[test]
fn a_writer_that_fails_ends_the_recording_and_not_the_program() {
    struct FailingWriter;
    impl Write for FailingWriter {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (mut lookup, _) = lookup(LookupConfig::cached(Geometry::new(64, 8, 4).unwrap()));
    lookup.start_recording(Box::new(FailingWriter)).unwrap();
    let process = lookup.add_process().unwrap();
    for number in 0..20_000 {
        drop(lookup.translate(page(process, number % 10), DataPath::Send).unwrap());
    }
    assert_eq!(lookup.end_recording().unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(lookup.end_recording().unwrap(), 0, "no recording is active");
}

#[test]
fn garbage_is_an_error_with_its_place() {
    let geometry = Geometry::new(64, 8, 4).unwrap();
    let trace = |words: &[u64]| {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes());
        HEADER.iter().copied().chain(bytes).collect::<Vec<u8>>()
    };
    let error = |bytes: &[u8]| replay(bytes, geometry).unwrap_err();
    assert!(matches!(error(b""), TraceError::Header));
    assert!(matches!(error(b"memferry trace 2"), TraceError::Header));
    let good = 1 << 61;
    let cut = trace(&[good, good]);
    assert!(matches!(error(&cut[..cut.len() - 3]), TraceError::Truncated { record: 1 }));
    for bad in [0, 6 << 61, 7 << 61, 5 << 61, 3 << 61 | 1] {
        let nonsense = error(&trace(&[good, bad]));
        assert!(matches!(nonsense, TraceError::InvalidRecord { record: 1, word } if word == bad));
    }
    // The first half of a range, and a range that ends before it begins.
    assert!(matches!(error(&trace(&[4 << 61])), TraceError::Truncated { record: 0 }));
    let backwards = trace(&[4 << 61 | 9, 5 << 61 | 8]);
    assert!(matches!(error(&backwards), TraceError::InvalidRecord { record: 0, .. }));
    // Removals of unknown processes are valid.
    assert_eq!(replay(&trace(&[3 << 61])[..], geometry).unwrap().fills, 0);
}

proptest! {
    #[test]
    fn no_garbage_makes_a_replay_panic(
        words in prop::collection::vec(any::<u64>(), 0..200),
        cut in 0..8usize,
        kinds in 0..2u64,
    ) {
        // Half of the runs have only records of valid kinds, so that more of them are parsed.
        let kind = |word: u64| if kinds == 0 { word } else { word >> 3 | (1 + word % 2) << 61 };
        let mut bytes = HEADER.to_vec();
        bytes.extend(words.iter().flat_map(|&word| kind(word).to_le_bytes()));
        bytes.truncate(bytes.len() - cut);
        let outcome = replay(&bytes[..], Geometry::new(64, 8, 4).unwrap());
        if kinds == 1 && cut == 0 {
            let counters = outcome.unwrap();
            let misses = counters.misses.send.total() + counters.misses.receive.total();
            prop_assert_eq!(counters.hits.send + counters.hits.receive + misses, words.len() as u64);
        }
    }
}
