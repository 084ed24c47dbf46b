//! Traces of accesses, and their replay in a cache of another geometry.
//!
//! A trace is a header and one 8-byte word for each access, little-endian: the kind in the upper
//! three bits, the process number in the next sixteen, the page number in the lower forty-five.
//! Removals of processes and invalidations are recorded too, so that a replay makes them at the
//! same positions. The reader validates every word.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::sync::Mutex;

use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;
use thiserror::Error;

use super::api::Lookup;
use super::backend::{AttachError, TranslationBackend};
use super::config::{DataPath, LookupConfig};
use super::counters::LookupCounters;
use super::error::{LookupError, TooManyProcesses};
use super::geometry::Geometry;
use super::line::LineKey;
use crate::handle::{ProcessAddress, ProcessHandle};

/// The first bytes of a trace: magic and version.
const HEADER: [u8; 16] = *b"memferry trace 1";

const PAGE_BITS: u32 = 45;
const MAX_PAGE: u64 = (1 << PAGE_BITS) - 1;
const KIND_SHIFT: u32 = PAGE_BITS + 16;

const SEND: u64 = 1;
const RECEIVE: u64 = 2;
const PROCESS_REMOVED: u64 = 3;
/// An invalidation has two words: the first page of the range, then the last.
const INVALIDATED_FROM: u64 = 4;
const INVALIDATED_TO: u64 = 5;

/// Size of the buffers for reading and writing, in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// One record of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceRecord {
    /// A page was looked up.
    Lookup {
        /// The number of the process.
        process: u16,
        /// The page number: the address divided by the page size.
        page: u64,
        /// The data path.
        path: DataPath,
    },
    /// A process was removed. Another process may reuse its number.
    ProcessRemoved {
        /// The number of the process.
        process: u16,
    },
    /// A range was invalidated.
    Invalidated {
        /// The number of the process.
        process: u16,
        /// The page numbers.
        pages: Range<u64>,
    },
}

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The reader failed.
    #[error("the trace cannot be read")]
    Read(#[from] io::Error),
    /// The header is not that of a trace of this version.
    #[error("not a trace of this version")]
    Header,
    /// The trace ends within a record.
    #[error("the trace ends within record {record}")]
    Truncated {
        /// The number of the record, from 0.
        record: u64,
    },
    /// A record is invalid.
    #[error("record {record} of the trace is invalid: {word:#x}")]
    InvalidRecord {
        /// The number of the record, from 0.
        record: u64,
        /// Its word.
        word: u64,
    },
    /// The trace has more simultaneous processes than a lookup supports.
    #[error(transparent)]
    Processes(#[from] TooManyProcesses),
    /// A lookup failed.
    #[error(transparent)]
    Lookup(#[from] LookupError),
}

/// Records accesses in order.
#[derive(Debug)]
pub(crate) struct Recorder {
    state: Mutex<RecorderState>,
}

struct RecorderState {
    writer: BufWriter<Box<dyn Write + Send>>,
    records: u64,
    /// The first error; nothing is written after it.
    failed: Option<io::Error>,
}

impl Recorder {
    pub(crate) fn new(writer: Box<dyn Write + Send>) -> io::Result<Self> {
        let mut writer = BufWriter::with_capacity(BUFFER_BYTES, writer);
        writer.write_all(&HEADER)?;
        Ok(Self { state: Mutex::new(RecorderState { writer, records: 0, failed: None }) })
    }

    pub(crate) fn access(&self, process: ProcessHandle, page: u64, route: DataPath) {
        let kind = match route {
            DataPath::Send => SEND,
            DataPath::Receive => RECEIVE,
        };
        self.write(&[word(kind, process.number(), page)]);
    }

    pub(crate) fn process_removed(&self, process: ProcessHandle) {
        self.write(&[word(PROCESS_REMOVED, process.number(), 0)]);
    }

    pub(crate) fn invalidated(&self, process: ProcessHandle, pages: Range<u64>) {
        if !pages.is_empty() {
            let from = word(INVALIDATED_FROM, process.number(), pages.start);
            // The last page, because the exclusive end may not fit into the bits of a page number.
            self.write(&[from, word(INVALIDATED_TO, process.number(), pages.end - 1)]);
        }
    }

    /// Flushes the writer and returns the number of records.
    pub(crate) fn finish(self) -> io::Result<u64> {
        let mut state = self.state.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        state.writer.flush()?;
        Ok(state.records)
    }

    fn write(&self, words: &[u64]) {
        let mut state = lock(&self.state);
        if state.failed.is_some() {
            return;
        }
        for word in words {
            if let Err(error) = state.writer.write_all(&word.to_le_bytes()) {
                tracing::warn!(%error, "recording of accesses stopped");
                state.failed = Some(error);
                return;
            }
        }
        state.records += 1;
    }
}

impl std::fmt::Debug for RecorderState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").field("records", &self.records).finish_non_exhaustive()
    }
}

fn word(kind: u64, process: u16, page: u64) -> u64 {
    kind << KIND_SHIFT | u64::from(process) << PAGE_BITS | page & MAX_PAGE
}

/// Iterates over the records of a trace.
#[derive(Debug)]
pub struct TraceReader<R> {
    reader: BufReader<R>,
    record: u64,
    done: bool,
}

impl<R: Read> TraceReader<R> {
    /// Reads the header.
    pub fn new(reader: R) -> Result<Self, TraceError> {
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, reader);
        let mut header = [0; HEADER.len()];
        match reader.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(TraceError::Header),
            Err(error) => Err(error.into()),
            Ok(()) if header != HEADER => Err(TraceError::Header),
            Ok(()) => Ok(Self { reader, record: 0, done: false }),
        }
    }

    fn read(&mut self) -> Result<Option<TraceRecord>, TraceError> {
        if self.reader.fill_buf()?.is_empty() {
            return Ok(None);
        }
        let (kind, process, page, word) = self.word()?;
        let invalid = TraceError::InvalidRecord { record: self.record, word };
        let access = match kind {
            SEND => TraceRecord::Lookup { process, page, path: DataPath::Send },
            RECEIVE => TraceRecord::Lookup { process, page, path: DataPath::Receive },
            PROCESS_REMOVED if page == 0 => TraceRecord::ProcessRemoved { process },
            INVALIDATED_FROM => match self.word()? {
                (INVALIDATED_TO, same, last, _) if same == process && last >= page => {
                    TraceRecord::Invalidated { process, pages: page..last + 1 }
                }
                (.., word) => return Err(TraceError::InvalidRecord { record: self.record, word }),
            },
            _ => return Err(invalid),
        };
        self.record += 1;
        Ok(Some(access))
    }

    fn word(&mut self) -> Result<(u64, u16, u64, u64), TraceError> {
        let mut bytes = [0; 8];
        self.reader.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => TraceError::Truncated { record: self.record },
            _ => error.into(),
        })?;
        let word = u64::from_le_bytes(bytes);
        Ok((word >> KIND_SHIFT, (word >> PAGE_BITS) as u16, word & MAX_PAGE, word))
    }
}

impl<R: Read> Iterator for TraceReader<R> {
    type Item = Result<TraceRecord, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let access = self.read().transpose();
        // After an error the boundaries of records are unknown.
        self.done = !matches!(access, Some(Ok(_)));
        access
    }
}

/// Replays a trace in a cache of a geometry, with a backend that does nothing. The tables behind
/// the cache hold at least 128 MiB of entries, enough for a trace of any realistic working set.
pub fn replay(reader: impl Read, geometry: Geometry) -> Result<LookupCounters, TraceError> {
    let high_water_lines = ((1 << 24) / geometry.line_entries()).max(4 * geometry.lines());
    let config = LookupConfig { high_water_lines, ..LookupConfig::cached(geometry) };
    let lookup = Lookup::new(config, NullBackend)?;
    let mut processes = HashMap::new();
    // Only page numbers matter, so the trace may be from a system with another page size.
    let page_bytes = page_bytes() as u64;
    for access in TraceReader::new(reader)? {
        match access? {
            TraceRecord::Lookup { process, page, path: route } => {
                let process = match processes.entry(process) {
                    Entry::Occupied(existing) => *existing.get(),
                    Entry::Vacant(new) => *new.insert(lookup.add_process()?),
                };
                let address = page * page_bytes;
                drop(lookup.translate(ProcessAddress { process, address }, route)?);
            }
            TraceRecord::ProcessRemoved { process } => {
                if let Some(process) = processes.remove(&process) {
                    lookup.remove_process(process);
                }
            }
            TraceRecord::Invalidated { process, pages } => {
                let length = (pages.end - pages.start) * page_bytes;
                if let Some(&process) = processes.get(&process) {
                    lookup.invalidate(process, pages.start * page_bytes, length);
                }
            }
        }
    }
    Ok(lookup.counters())
}

/// A backend for which every page has memory.
struct NullBackend;

impl TranslationBackend for NullBackend {
    fn attach(&self, _: LineKey, entries: &mut [u64]) -> Result<(), AttachError> {
        entries.fill(1);
        Ok(())
    }

    fn detach(&self, _: LineKey, _: &[u64]) {}
}
