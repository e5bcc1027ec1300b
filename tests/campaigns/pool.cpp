// Uses the kernels' thread pool from several threads: jobs, other numbers of threads, pauses, ends, and one pool that
// they take turns with. Prints how many tasks did not run exactly once. Built with pool.cpp and -fsanitize=thread.
#include "pool.h"
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

static long use(Context& context, std::mt19937& draw, int jobs) {
    long wrong = 0;
    while (jobs-- > 0) {
        if (draw() % 8 == 0) context.pool.resize(1 + draw() % 6);
        if (draw() % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(draw() % 20));
        const int count = draw() % 200;
        std::vector<int> seen(count);  // not atomic: a task runs once, and its writes are seen after
        parallel(context, count, [&](int task) { seen[task]++; });
        for (const int times : seen) wrong += times != 1;
    }
    return wrong;
}

int main(int, char** arguments) {
    const unsigned seed = (unsigned)std::stoul(arguments[1]);
    Context shared(3);
    std::mutex turn;
    std::atomic<long> wrong{0};
    std::thread users[3];
    for (unsigned user = 0; user < 3; user++)
        users[user] = std::thread([&, user] {
            std::mt19937 draw(seed * 3 + user);
            for (int life = 0; life < 10; life++) {
                Context own(1 + draw() % 6);
                wrong += use(own, draw, draw() % 40);
                std::lock_guard<std::mutex> lock(turn);
                wrong += use(shared, draw, draw() % 10);
            }
        });
    for (auto& user : users) user.join();
    std::printf("%ld tasks did not run exactly once\n", wrong.load());
    return wrong != 0;
}
