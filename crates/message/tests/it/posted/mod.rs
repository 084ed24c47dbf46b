//! Operations that are posted with a context and end in completion entries, and peers that are
//! known by name.

mod buffers;
mod messages;
mod peers;
mod requests;

use std::time::{Duration, Instant};

use memferry_message::{
    CompletionEntry, CompletionKind, CompletionOptions, Endpoint, Envelope, Error, MatchSpace,
    MatchSpec, Rights, Segment, Source, TAG_ALL,
};

fn endpoint(name: &str) -> (Endpoint, String) {
    let name = format!("posted-{}-{name}", std::process::id());
    (Endpoint::open(&name).unwrap(), name)
}

/// Two endpoints that know each other.
fn pair(name: &str) -> [(Endpoint, memferry_message::Peer); 2] {
    let (one, first) = endpoint(&format!("{name}-1"));
    let (two, second) = endpoint(&format!("{name}-2"));
    let (to_two, to_one) = (one.add_peer(&second).unwrap(), two.add_peer(&first).unwrap());
    [(one, to_two), (two, to_one)]
}

/// Makes progress on all endpoints until `count` completions have come; returns those of the last
/// endpoint.
fn completions(endpoints: &[&Endpoint], of: usize, count: usize) -> Vec<CompletionEntry> {
    let mut found = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(200);
    while found.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} reports came", found.len());
        for (index, endpoint) in endpoints.iter().enumerate() {
            if index == of {
                endpoint.poll_completions(&mut found);
            } else {
                endpoint.progress();
            }
        }
    }
    found
}

fn target(bytes: &mut [u8]) -> [Segment; 1] {
    [Segment::target(bytes.as_mut_ptr(), bytes.len())]
}

fn source(bytes: &[u8]) -> [Segment; 1] {
    [Segment::source(bytes.as_ptr(), bytes.len())]
}

fn options(context: u64) -> CompletionOptions {
    CompletionOptions { context, ..CompletionOptions::default() }
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    memferry_testing::pattern::pattern(length, seed as u64)
}
