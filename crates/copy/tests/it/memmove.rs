//! Any copy inside a buffer has memmove's result, whatever the sizes, offsets and settings.

use crate::common::{builder, pattern};
use memferry_copy::policy::PolicyKind;
use memferry_copy::{CacheHint, Ferry, Options, Request};
use proptest::prelude::*;

const BUFFER: usize = 400_000;

fn ferries() -> Vec<Ferry> {
    let tiny = builder().inline_bytes(0).split_bytes(1).stream_bytes(1).chunk_bytes(4096);
    vec![
        builder().build().unwrap(),
        tiny.clone().channels(3).policy(PolicyKind::Adaptive).build().unwrap(),
        tiny.capacity(1).policy(PolicyKind::Dedicated).build().unwrap(),
    ]
}

fn offset_and_length() -> impl Strategy<Value = (usize, usize, usize)> {
    let length = prop_oneof![0usize..300, 0usize..20_000, 0usize..BUFFER / 2];
    length.prop_flat_map(|length| (0..=BUFFER - length, 0..=BUFFER - length, Just(length)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn copies_between_any_two_ranges_of_a_buffer_equal_memmove(
        (from, to, length) in offset_and_length(),
        blocking: bool,
        cold: bool,
        seed: u64,
    ) {
        thread_local! {
            static FERRIES: Vec<Ferry> = ferries();
        }
        let original = pattern(BUFFER, seed);
        let mut expected = original.clone();
        expected.copy_within(from..from + length, to);
        FERRIES.with(|ferries| {
            for ferry in ferries {
                let mut ours = original.clone();
                let start = ours.as_mut_ptr();
                let temperature = if cold { CacheHint::Cold } else { CacheHint::Unknown };
                // SAFETY: both ranges lie inside the vector, which lives until after the wait.
                unsafe {
                    let request = Request::copy(start.add(from), start.add(to), length)
                        .with(Options::new().cache_hint(temperature));
                    if blocking {
                        ferry.run_raw(request).unwrap();
                    } else {
                        ferry.start_raw(request).unwrap().wait().unwrap();
                    }
                }
                assert!(ours == expected, "{from} -> {to}, {length} bytes");
            }
        });
    }
}
