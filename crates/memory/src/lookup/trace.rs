//! Recorded accesses, and what a cache of another shape would have made of them.
//!
//! A trace is a header and one word of eight bytes for each access, little-endian: what it is in the
//! upper three bits, the number of the process in the next sixteen, the number of the page in the
//! lower forty-five. Ends of processes and forgotten ranges are in it too, so that a replay forgets
//! at the same moments. Nothing in a trace is believed without a look.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::sync::Mutex;

use memferry_sys::pages::page_bytes;
use memferry_sys::sync::lock;
use thiserror::Error;

use super::counters::Counters;
use super::error::{LookupError, TooManyProcesses};
use super::front::Lookup;
use super::geometry::Geometry;
use super::line::LineName;
use super::settings::{Route, Settings};
use super::source::{Refused, Source};
use crate::handle::{ProcessHandle, VirtualMemoryHandle};

/// The first bytes of a trace: what it is, and the version.
const HEADER: [u8; 16] = *b"memferry trace 1";

const PAGE_BITS: u32 = 45;
const MOST_PAGE: u64 = (1 << PAGE_BITS) - 1;
const KIND_SHIFT: u32 = PAGE_BITS + 16;

const SEND: u64 = 1;
const RECEIVE: u64 = 2;
const PROCESS_ENDED: u64 = 3;
/// Two words: the first page of the range, then the last.
const FORGOTTEN_FROM: u64 = 4;
const FORGOTTEN_TO: u64 = 5;

/// How much is kept in memory before it is written.
const BUFFER_BYTES: usize = 64 << 10;

/// One record of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// A page was looked up.
    Lookup {
        /// The number of its process.
        process: u16,
        /// Its number: the address divided by the size of a page.
        page: u64,
        /// The route.
        route: Route,
    },
    /// A process was removed. Its number may come again, for another one.
    ProcessEnded {
        /// Its number.
        process: u16,
    },
    /// A range was forgotten.
    Forgotten {
        /// The number of its process.
        process: u16,
        /// The numbers of its pages.
        pages: Range<u64>,
    },
}

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The reader failed.
    #[error("the trace cannot be read")]
    Read(#[from] io::Error),
    /// It is not a trace, or of another version.
    #[error("not a trace of this version")]
    Header,
    /// It ends within a record.
    #[error("the trace ends within record {record}")]
    Cut {
        /// The number of the record, from 0.
        record: u64,
    },
    /// A record makes no sense.
    #[error("record {record} of the trace makes no sense: {word:#x}")]
    Nonsense {
        /// The number of the record, from 0.
        record: u64,
        /// What it holds.
        word: u64,
    },
    /// More processes at the same time than a lookup has numbers for.
    #[error(transparent)]
    Processes(#[from] TooManyProcesses),
    /// The lookup refused an access.
    #[error(transparent)]
    Lookup(#[from] LookupError),
}

/// Writes accesses down, in the order in which they come.
#[derive(Debug)]
pub(crate) struct Recorder {
    state: Mutex<Recording>,
}

struct Recording {
    writer: BufWriter<Box<dyn Write + Send>>,
    records: u64,
    /// The first thing that went wrong; nothing is written after it.
    failed: Option<io::Error>,
}

impl Recorder {
    pub(crate) fn new(writer: Box<dyn Write + Send>) -> io::Result<Self> {
        let mut writer = BufWriter::with_capacity(BUFFER_BYTES, writer);
        writer.write_all(&HEADER)?;
        Ok(Self { state: Mutex::new(Recording { writer, records: 0, failed: None }) })
    }

    pub(crate) fn access(&self, process: ProcessHandle, page: u64, route: Route) {
        let kind = match route {
            Route::Send => SEND,
            Route::Receive => RECEIVE,
        };
        self.write(&[word(kind, process.number(), page)]);
    }

    pub(crate) fn process_ended(&self, process: ProcessHandle) {
        self.write(&[word(PROCESS_ENDED, process.number(), 0)]);
    }

    pub(crate) fn forgotten(&self, process: ProcessHandle, pages: Range<u64>) {
        if !pages.is_empty() {
            let from = word(FORGOTTEN_FROM, process.number(), pages.start);
            // The last page, because the one behind it may have no number.
            self.write(&[from, word(FORGOTTEN_TO, process.number(), pages.end - 1)]);
        }
    }

    /// Writes what is left and says how many records there are.
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
                tracing::warn!(%error, "recording of accesses ends");
                state.failed = Some(error);
                return;
            }
        }
        state.records += 1;
    }
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").field("records", &self.records).finish_non_exhaustive()
    }
}

fn word(kind: u64, process: u16, page: u64) -> u64 {
    kind << KIND_SHIFT | u64::from(process) << PAGE_BITS | page & MOST_PAGE
}

/// The accesses of a trace, one after the other.
#[derive(Debug)]
pub struct Accesses<R> {
    reader: BufReader<R>,
    record: u64,
    over: bool,
}

impl<R: Read> Accesses<R> {
    /// Reads the header.
    pub fn new(reader: R) -> Result<Self, TraceError> {
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, reader);
        let mut header = [0; HEADER.len()];
        match reader.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(TraceError::Header),
            Err(error) => Err(error.into()),
            Ok(()) if header != HEADER => Err(TraceError::Header),
            Ok(()) => Ok(Self { reader, record: 0, over: false }),
        }
    }

    fn read(&mut self) -> Result<Option<Access>, TraceError> {
        if self.reader.fill_buf()?.is_empty() {
            return Ok(None);
        }
        let (kind, process, page, word) = self.word()?;
        let nonsense = TraceError::Nonsense { record: self.record, word };
        let access = match kind {
            SEND => Access::Lookup { process, page, route: Route::Send },
            RECEIVE => Access::Lookup { process, page, route: Route::Receive },
            PROCESS_ENDED if page == 0 => Access::ProcessEnded { process },
            FORGOTTEN_FROM => match self.word()? {
                (FORGOTTEN_TO, same, last, _) if same == process && last >= page => {
                    Access::Forgotten { process, pages: page..last + 1 }
                }
                (.., word) => return Err(TraceError::Nonsense { record: self.record, word }),
            },
            _ => return Err(nonsense),
        };
        self.record += 1;
        Ok(Some(access))
    }

    fn word(&mut self) -> Result<(u64, u16, u64, u64), TraceError> {
        let mut bytes = [0; 8];
        self.reader.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => TraceError::Cut { record: self.record },
            _ => error.into(),
        })?;
        let word = u64::from_le_bytes(bytes);
        Ok((word >> KIND_SHIFT, (word >> PAGE_BITS) as u16, word & MOST_PAGE, word))
    }
}

impl<R: Read> Iterator for Accesses<R> {
    type Item = Result<Access, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let access = self.read().transpose();
        // Behind an error nothing can be told apart any more.
        self.over = !matches!(access, Some(Ok(_)));
        access
    }
}

/// Runs a trace through a cache of some shape, with a source that does nothing. The tables behind
/// the cache keep at least 128 MiB of entries, as much as any trace of a working set needs.
pub fn replay(reader: impl Read, geometry: Geometry) -> Result<Counters, TraceError> {
    let high_water_lines = ((1 << 24) / geometry.line_entries()).max(4 * geometry.lines());
    let settings = Settings { high_water_lines, ..Settings::dynamic(geometry) };
    let lookup = Lookup::new(settings, Nothing)?;
    let mut processes = HashMap::new();
    // Pages of another size in the trace are pages of this size here: only their numbers count.
    let page_bytes = page_bytes() as u64;
    for access in Accesses::new(reader)? {
        match access? {
            Access::Lookup { process, page, route } => {
                let process = match processes.entry(process) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(new) => *new.insert(lookup.add_process()?),
                };
                let address = page * page_bytes;
                drop(lookup.translate(VirtualMemoryHandle { process, address }, route)?);
            }
            Access::ProcessEnded { process } => {
                if let Some(process) = processes.remove(&process) {
                    lookup.remove_process(process);
                }
            }
            Access::Forgotten { process, pages } => {
                let length = (pages.end - pages.start) * page_bytes;
                if let Some(&process) = processes.get(&process) {
                    lookup.forget(process, pages.start * page_bytes, length);
                }
            }
        }
    }
    Ok(lookup.counters())
}

/// A source for which every page has memory.
struct Nothing;

impl Source for Nothing {
    fn attach(&self, _: LineName, entries: &mut [u64]) -> Result<(), Refused> {
        entries.fill(1);
        Ok(())
    }

    fn detach(&self, _: LineName, _: &[u64]) {}
}
