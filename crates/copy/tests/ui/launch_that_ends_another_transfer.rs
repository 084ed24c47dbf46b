// error: E0133
use memferry_engine::Completion;
use memferry_engine::completion::Launch;

fn ends(completion: &Completion) {
    Launch::now(completion, []);
}

fn main() {}
