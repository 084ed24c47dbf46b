//! Channels of one engine that sleep and are woken together.

use std::sync::Arc;

use memferry_engine::cpu::{CpuEngine, CpuProfile};
use memferry_engine::{Channel, ChannelOptions, Completion, Descriptor, Engine, Opcode};
use memferry_testing::until;

const CHANNELS: usize = 8;

fn channels() -> Vec<Arc<dyn Channel>> {
    let engine = CpuEngine::new(Arc::new(CpuProfile::built_in()));
    let options = ChannelOptions { spin_ns: Some(0), ..ChannelOptions::default() };
    (0..CHANNELS).map(|_| engine.open_channel(&options).unwrap()).collect()
}

/// Submits a fill to each channel; returns their completions.
fn submit(channels: &[Arc<dyn Channel>], targets: &mut [u8], value: u8) -> Vec<Arc<Completion>> {
    let submit = |(channel, target): (&Arc<dyn Channel>, &mut u8)| {
        let completion = Arc::new(Completion::whole());
        // SAFETY: one byte, which the callers keep until the completion is done; the completion has no
        // other descriptor.
        let fill = unsafe {
            Descriptor::new(Opcode::Fill, 0, std::ptr::from_mut(target) as u64, 1)
                .value(value)
                .completes(completion.clone())
        };
        channel.submit_one(fill).unwrap();
        completion
    };
    channels.iter().zip(targets).map(submit).collect()
}

#[test]
fn channels_that_all_sleep_execute_what_one_thread_submits() {
    const ROUNDS: u8 = 100;
    let channels = channels();
    for round in 1..=ROUNDS {
        until("all sleep", || channels.iter().all(|channel| channel.is_asleep()));
        let mut targets = [0; CHANNELS];
        // Nobody waits for a channel, so only the channels wake each other.
        let completions = submit(&channels, &mut targets, round);
        assert!(completions.iter().all(|completion| completion.wait(0, None)));
        assert_eq!(targets, [round; CHANNELS]);
    }
    let wakes: u64 = channels.iter().map(|channel| channel.statistics().wakes).sum();
    assert!(wakes > 0, "no sleep was ended by a submit");
}

#[test]
fn channels_that_sleep_now_and_then_execute_what_many_threads_submit() {
    const ROUNDS: u8 = 200;
    const THREADS: usize = 4;
    let channels = channels();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let channels = &channels;
            scope.spawn(move || {
                for round in 1..=ROUNDS {
                    let mut targets = [0; CHANNELS];
                    let first = (thread + usize::from(round)) % CHANNELS;
                    let completions = submit(&channels[first..], &mut targets, round);
                    assert!(completions.iter().all(|completion| completion.wait(0, None)));
                    assert_eq!(targets[..CHANNELS - first], [round; CHANNELS][first..]);
                }
            });
        }
    });
}
